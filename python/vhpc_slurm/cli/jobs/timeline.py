# SPDX-License-Identifier: Apache-2.0
"""vhpc timeline: a waterfall of a job's stages on each of its nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from vhpc_slurm.cli import context, leases, options, output
from vhpc_slurm.cli.jobs import runs
from vhpc_slurm.cli.jobs.runs import Run
from vhpc_slurm.cli.options import JobId, Json
from vhpc_slurm.config import Config
from vhpc_slurm.errors import FabricError, UserError
from vhpc_slurm.model import Generation, Stage, Timeline
from vhpc_slurm.model.lease import FAILED, TEARDOWN
from vhpc_slurm.node.store import timeline as stored
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.terminal import printable

BAR_WIDTH = 40


def timeline(
    job_id: JobId,
    node: Annotated[
        str | None,
        typer.Option("--node", metavar="NODE", help="Only this node of the job."),
    ] = None,
    as_json: Json = False,
) -> int:
    """Show the stages of each boot and teardown of a job on each node, with durations, and its checkpoints.

    Nodes send their stages when the guests are ready, and again when the job ends.
    """
    found = _find(options.config(), job_id)
    if node is not None:
        known = ", ".join(sorted({line.node for _, lines in found for line in lines}, key=natural))
        chosen = [(run, [line for line in lines if line.node == node]) for run, lines in found]
        found = [(run, lines) for run, lines in chosen if lines]
        if not found:
            raise UserError(
                f"job {job_id} has no timeline of node {node}", f"it has timelines of: {known or 'no node'}"
            )
    if as_json:
        output.write_json(_json(found))
        return 0
    for number, (run, lines) in enumerate(found):
        if number:
            print()
        _show(run, lines, several=len(found) > 1)
    return 0


def _show(run: Run | Generation, lines: Sequence[Timeline], *, several: bool) -> None:
    generation = _generation(run)
    origin = runs.origin(run.record) if isinstance(run, Run) else ""
    parts = (
        f"job {generation.job_id}",
        f"run {generation.restart}" if several else "",
        f"generation {generation}",
        origin,
    )
    print(", ".join(filter(None, parts)))
    waterfall("boot", [(line.node, line.boot) for line in lines])
    if isinstance(run, Run) and run.checkpoints:
        table = runs.checkpoint_table([run])
        output.write_table(table.head, table.rows, right=runs.RIGHT)
    waterfall("teardown", [(line.node, line.teardown) for line in lines])
    for line in lines:
        print(f"{line.node}: {verdict(line)}")
    if not lines:
        print("no node has sent a timeline")


def _generation(run: Run | Generation) -> Generation:
    return run.record.lease.generation if isinstance(run, Run) else run


def _find(config: Config, job_id: int) -> list[tuple[Run | Generation, list[Timeline]]]:
    """The runs of a job, oldest first, with their timelines.

    This node's own are added, which vhpcd gets when the boot and the job have ended. If vhpcd does not know
    the job, or does not answer, the last one of this node is all.
    """
    local = _local(config, job_id)
    last = max(local, key=lambda line: (line.generation.restart, line.stages[0].began), default=None)
    client = leases.client(config)
    try:
        records = client.leases(job_id=job_id)
        every = runs.make(records, client.checkpoints(job_id) if records else (), {})
    except FabricError:
        if last is None:
            raise
        return [(last.generation, [last])]
    if not every:
        if last is None:
            raise leases.unknown(job_id)
        return [(last.generation, [last])]
    found: list[tuple[Run | Generation, list[Timeline]]] = [(run, _lines(run, local)) for run in every]
    if not any(lines for _, lines in found):
        raise UserError(
            f"vhpcd has no timeline of job {job_id} yet",
            "a node sends it when its guests are ready, and again when the job ends",
            "see: vhpc ps; root sees it earlier on a node of the job: "
            + output.node_list(every[-1].record.lease.allocation.node_names),
        )
    return found


def _lines(run: Run, local: Sequence[Timeline]) -> list[Timeline]:
    lines = {line.node: line for line in run.record.timelines}
    lines |= {line.node: line for line in local if line.generation == run.record.lease.generation}
    return [lines[name] for name in sorted(lines, key=natural)]


def _local(config: Config, job_id: int) -> list[Timeline]:
    """Timelines of a job on this node."""
    if not context.is_root():
        return []
    return [
        line
        for path in Layout(config).timelines.glob(f"{job_id}.*.json")
        if (line := stored.read_timeline(path)) is not None and line.stages
    ]


def natural(name: str) -> tuple[int, str]:
    """Sorts names of nodes by their numbers."""
    return len(name), name


def waterfall(title: str, lines: Sequence[tuple[str, Sequence[Stage]]]) -> None:
    """Print the stages of one phase, aligned to the earliest start of all nodes."""
    from rich.bar import Bar

    every = [stage for _, stages in lines for stage in stages]
    if not every:
        return
    origin = min(stage.began for stage in every)
    whole = max(max(stage.ended for stage in every) - origin, 0.001)
    rows = []
    for node, stages in lines:
        for stage in stages:
            begin, end = stage.began - origin, stage.ended - origin
            # also a stage that took no time must be visible
            shown = max(end, begin + whole / BAR_WIDTH / 4)
            bar = Bar(whole, min(begin, whole * (1 - 0.25 / BAR_WIDTH)), min(shown, whole), width=BAR_WIDTH)
            rows.append((node, stage.name, f"{begin:.3f}", f"{end - begin:.3f}", bar, stage.detail))
    output.write_table(
        ("NODE", title.upper(), "START s", "TOOK s", "", "DETAIL"), rows, right=("START s", "TOOK s")
    )


def verdict(line: Timeline) -> str:
    """After how many seconds the guests were ready, or why they are not."""
    seconds = line.ready_s
    if seconds is not None:
        return f"ready after {seconds:.3f} s"
    for stage in line.stages:
        if stage.detail.startswith(FAILED):
            return printable(f"not ready, {stage.name} {stage.detail}")
    return "not ready yet"


def _json(found: Sequence[tuple[Run | Generation, Sequence[Timeline]]]) -> dict[str, Any]:
    last, lines = found[-1]
    return {
        "job": _generation(last).job_id,
        "generation": str(_generation(last)),
        "nodes": _nodes(lines),
        "runs": [
            (runs.of_run(run) if isinstance(run, Run) else {"restart": run.restart, "generation": str(run)})
            | {"timelines": _nodes(lines)}
            for run, lines in found
        ],
    }


def _nodes(lines: Sequence[Timeline]) -> list[dict[str, Any]]:
    return [
        {
            "node": line.node,
            "ready_s": line.ready_s,
            "stages": stages(line),
        }
        for line in lines
    ]


def stages(line: Timeline) -> list[dict[str, Any]]:
    """The stages of a node in JSON."""
    return [
        {
            "name": stage.name,
            "phase": "teardown" if stage.name in TEARDOWN else "boot",
            "began": stage.began,
            "ended": stage.ended,
            "took_s": round(stage.ended - stage.began, 6),
            "detail": stage.detail,
        }
        for stage in line.stages
    ]
