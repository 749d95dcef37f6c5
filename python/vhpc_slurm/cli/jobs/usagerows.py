# SPDX-License-Identifier: Apache-2.0
"""Usage of programs in guests, as rows of a table and as JSON; for ``seff`` and ``report``.  Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from vhpc_slurm.cli import output
from vhpc_slurm.model import Figures, Generation, JobUsage, NodeUsage, SharedIo, StepUsage, job_usage
from vhpc_slurm.model.usage import GpuUsage
from vhpc_slurm.terminal import printable

if TYPE_CHECKING:
    from vhpc_slurm.controller.api.usage_messages import UsagePage

UNKNOWN = "-"
HEAD = ("STEP", "TASKS", "CPU", "USER", "SYSTEM", "PEAK", "LARGEST", "READ", "WRITTEN", "OOM")
"""Of the rows of ``row``."""


def of_job(page: UsagePage, nodes: Sequence[NodeUsage]) -> JobUsage | None:
    """The sum of the nodes' final reports and of the other nodes' reports until now; None: no report."""
    generation = Generation.parse(page.generation)
    running = [NodeUsage(generation, one.node, one.guests) for one in page.so_far]
    if not nodes and not running:
        return None
    return job_usage([*nodes, *running], max((one.age_s for one in page.so_far), default=None))


def table(used: JobUsage) -> None:
    """Print one row for each step, and which guests have no figures."""
    output.write_table(HEAD, [row(step) for step in used.steps], right=HEAD[1:])
    for node, index, why in used.missing:
        print(printable(f"no figures of guest {index} on {node}: {why}"))


def lines(used: JobUsage) -> list[str]:
    """Usage of the job that belongs to no step."""
    so_far = [] if used.so_far_s is None else [f"the job runs; figures: {so_far_text(used.so_far_s)}"]
    return [f"shared folders: {shared_text(used.shared)}", *gpu_lines(used), *so_far]


def gpu_lines(used: JobUsage) -> list[str]:
    """One line for each GPU that has figures, and for each guest that lacks them."""
    return [
        *(f"GPU {gpu_text(gpu)} (guest {index} on {printable(node)})" for node, index, gpu in used.gpus),
        *(
            f"no figures of GPUs of guest {index} on {printable(node)}: {printable(why)}"
            for node, index, why in used.gpus_missing
        ),
    ]


def gpu_text(gpu: GpuUsage) -> str:
    """Address, mean use, peak memory and mean power of a GPU, without what is not known."""
    known = [
        *([] if gpu.busy_e4 is None else [f"{gpu.busy_e4 / 100:.1f}% busy"]),
        *([] if gpu.memory_bytes is None else [f"peak memory {output.size(gpu.memory_bytes)}"]),
        *([] if gpu.power_mw is None else [f"{gpu.power_mw / 1000:.1f} W"]),
    ]
    return f"{gpu.address}: {', '.join(known)}"


def gpus_json(used: JobUsage) -> list[dict[str, Any]]:
    """The same as JSON; null where a figure is not known."""
    return [{"node": node, "guest": index, **asdict(gpu)} for node, index, gpu in used.gpus]


def so_far_text(age_s: float) -> str:
    """How old the figures of a running job are."""
    return f"so far, {output.span(age_s)} ago"


def shared_text(shared: SharedIo | None) -> str:
    """The amounts that were read from shared folders and written to them."""
    if shared is None:
        return "not known"
    return f"read {output.size(shared.read_bytes)}, written {output.size(shared.written_bytes)}"


def shared_json(shared: SharedIo | None) -> dict[str, Any] | None:
    """The same as JSON."""
    return None if shared is None else asdict(shared)


def document(used: JobUsage) -> dict[str, Any]:
    """The same as JSON."""
    return {
        "total": asdict(used.whole),
        "so_far": None if used.so_far_s is None else {"age_s": round(used.so_far_s, 1)},
        "shared_folders": shared_json(used.shared),
        "gpus": gpus_json(used),
        "steps": [step_json(step) for step in used.steps],
        "missing": [{"node": node, "guest": index, "why": why} for node, index, why in used.missing],
    }


def row(step: StepUsage) -> tuple[str, ...]:
    """A step's row of a table."""
    one = step.figures
    return (
        step.step,
        UNKNOWN if step.tasks is None else str(step.tasks),
        time_text(one.cpu_us),
        time_text(one.user_us),
        time_text(one.system_us),
        *(size_text(value) for value in (one.peak_bytes, one.rss_bytes, one.read_bytes, one.written_bytes)),
        UNKNOWN if one.oom_kills is None else str(one.oom_kills),
    )


def time_text(micros: int | None) -> str:
    """``[DAYS-]HH:MM:SS.CC``, as sacct writes TotalCPU."""
    if micros is None:
        return UNKNOWN
    seconds, rest = divmod(micros, 1_000_000)
    days, seconds = divmod(seconds, 86400)
    clock = f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}.{rest // 10_000:02}"
    return f"{days}-{clock}" if days else clock


def size_text(count: int | None) -> str:
    """Bytes for people."""
    return UNKNOWN if count is None else output.size(count)


def step_json(step: StepUsage) -> dict[str, Any]:
    """A step's figures; null where the guest does not know one."""
    figures: Figures = step.figures
    return {"step": step.step, "tasks": step.tasks, **asdict(figures)}
