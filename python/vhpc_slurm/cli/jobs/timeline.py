# SPDX-License-Identifier: Apache-2.0
"""vhpc timeline: a waterfall of a job's stages on each of its nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from vhpc_slurm.cli import context, leases, options, output
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
    """Show the stages of a job's boot and teardown on each node, with durations.

    Nodes send their stages when the guests are ready, and again when the job ends.
    """
    generation, lines = _find(options.config(), job_id)
    if node is not None:
        known = ", ".join(line.node for line in lines) or "no node"
        lines = [line for line in lines if line.node == node]
        if not lines:
            raise UserError(f"job {job_id} has no timeline of node {node}", f"it has timelines of: {known}")
    if as_json:
        output.write_json(_json(generation, lines))
        return 0
    print(f"job {job_id}, generation {generation}")
    waterfall("boot", [(line.node, line.boot) for line in lines])
    waterfall("teardown", [(line.node, line.teardown) for line in lines])
    for line in lines:
        print(f"{line.node}: {verdict(line)}")
    return 0


def _find(config: Config, job_id: int) -> tuple[Generation, list[Timeline]]:
    """Timelines from vhpcd, and this node's own, which vhpcd gets when the boot and the job have ended."""
    local = _local(config, job_id)
    try:
        record = leases.of_job(config, job_id)
    except FabricError:
        if local is None:
            raise
        return local.generation, [local]
    if record is None:
        if local is None:
            raise leases.unknown(job_id)
        return local.generation, [local]
    lines = {line.node: line for line in record.timelines}
    if local is not None and local.generation == record.lease.generation:
        lines[local.node] = local
    if not lines:
        raise UserError(
            f"vhpcd has no timeline of job {job_id} yet",
            "a node sends it when its guests are ready, and again when the job ends",
            "see: vhpc ps; root sees it earlier on a node of the job: "
            + output.node_list(record.lease.allocation.node_names),
        )
    return record.lease.generation, [lines[name] for name in sorted(lines, key=natural)]


def _local(config: Config, job_id: int) -> Timeline | None:
    """Timeline of the last incarnation on this node; None without one."""
    if not context.is_root():
        return None
    folder = Layout(config).timelines
    found = [
        line
        for path in folder.glob(f"{job_id}.*.json")
        if (line := stored.read_timeline(path)) is not None and line.stages
    ]
    return max(found, key=lambda line: (line.generation.restart, line.stages[0].began), default=None)


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


def _json(generation: Generation, lines: Sequence[Timeline]) -> dict[str, Any]:
    return {
        "job": generation.job_id,
        "generation": str(generation),
        "nodes": [
            {
                "node": line.node,
                "ready_s": line.ready_s,
                "stages": [
                    {
                        "name": stage.name,
                        "phase": "teardown" if stage.name in TEARDOWN else "boot",
                        "began": stage.began,
                        "ended": stage.ended,
                        "took_s": round(stage.ended - stage.began, 6),
                        "detail": stage.detail,
                    }
                    for stage in line.stages
                ],
            }
            for line in lines
        ],
    }
