# SPDX-License-Identifier: Apache-2.0
"""vhpc seff: what the programs of a job have used in its guests, and how much of what it asked for.

Of a running job it is what they have used until its nodes were last asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from vhpc_slurm import slurm
from vhpc_slurm.cli import leases, options, output
from vhpc_slurm.cli.jobs import usagerows
from vhpc_slurm.cli.jobs.usagerows import UNKNOWN, size_text, step_json, time_text
from vhpc_slurm.cli.options import JobId, Json
from vhpc_slurm.config import Config
from vhpc_slurm.errors import UserError
from vhpc_slurm.model import GuestUsage, JobUsage, NodeUsage
from vhpc_slurm.slurm.port import SlurmError

if TYPE_CHECKING:
    from vhpc_slurm.controller.api.usage_messages import UsagePage
    from vhpc_slurm.slurm.sacct import AccountedJob


def seff(job_id: JobId, as_json: Json = False) -> int:
    """Show CPU time, memory and I/O of a job's programs, by step, as the guests measured them.

    Of a running job: so far, until the last health check of its nodes.
    Users see their own jobs, root and SlurmUser all. sacct and seff only see the relays on the nodes.
    """
    config = options.config()
    page, nodes = leases.client(config).usage(job_id, so_far=True)
    used = usagerows.of_job(page, nodes)
    if used is None:
        raise UserError(
            f"no node has reported what job {job_id} has used",
            "nodes report in each health check while the job runs, and when it ends; "
            "one without guests has nothing to report",
            f"see: scontrol show job {job_id}; HealthCheckInterval is in: scontrol show config",
        )
    job = _accounted(config, job_id)
    if as_json:
        output.write_json(_json(job_id, page, nodes, used, job))
        return 0
    output.write_facts(_facts(job_id, page, used, job))
    print()
    usagerows.table(used)
    for line in usagerows.gpu_lines(used):
        print(line)
    silent = page.taken - len(nodes) - len(page.so_far)
    if silent > 0:
        print(f"nodes that have not reported: {silent}")
    return 0


def efficiency(part: int | None, whole: float) -> float | None:
    """Per cent; None if one of the two is not known."""
    return None if part is None or whole <= 0 else 100.0 * part / whole


def _accounted(config: Config, job_id: int) -> AccountedJob | None:
    try:
        return slurm.accounting(config).job(job_id)
    except SlurmError:
        return None  # the figures themselves do not need it


def _core_us(job: AccountedJob | None, page: UsagePage) -> int:
    """Core-walltime until the figures were measured, if all nodes have as many cores."""
    if job is None:
        return 0
    age_s = sum(one.age_s for one in page.so_far) / max(1, page.nodes)
    return max(0, int(job.cpus * (job.elapsed_s - age_s) * 1_000_000))


def _facts(job_id: int, page: UsagePage, used: JobUsage, job: AccountedJob | None) -> list[tuple[str, str]]:
    whole, core_us, memory = used.whole, _core_us(job, page), page.memory_mib << 20
    facts = [
        ("Job ID", f"{job_id} (generation {page.generation})"),
        ("User", page.user),
        ("State", UNKNOWN if job is None else job.state),
        ("Figures", "in all" if used.so_far_s is None else usagerows.so_far_text(used.so_far_s)),
        ("Nodes", f"{page.nodes} ({used.guests - len(used.missing)} of {used.guests} guests have figures)"),
        ("Cores", UNKNOWN if job is None else str(job.cpus)),
        (
            "CPU Utilized",
            f"{time_text(whole.cpu_us)} (user {time_text(whole.user_us)}, "
            f"system {time_text(whole.system_us)})",
        ),
        (
            "CPU Efficiency",
            _percent(efficiency(whole.cpu_us, core_us), f"{time_text(core_us or None)} core-walltime"),
        ),
        ("Job Wall-clock time", UNKNOWN if job is None else time_text(job.elapsed_s * 1_000_000)),
        ("Memory Utilized", f"{size_text(whole.peak_bytes)} (peak of each guest, with the cache of files)"),
        ("Memory Efficiency", _percent(efficiency(whole.peak_bytes, memory), size_text(memory or None))),
        ("Shared folders", usagerows.shared_text(used.shared)),
    ]
    if whole.oom_kills:
        facts.append(("Killed for memory", f"{whole.oom_kills} processes"))
    return facts


def _percent(value: float | None, of: str) -> str:
    return f"not known, of {of}" if value is None else f"{value:.2f}% of {of}"


def _json(
    job_id: int, page: UsagePage, nodes: Sequence[NodeUsage], used: JobUsage, job: AccountedJob | None
) -> dict[str, Any]:
    return {
        "job": job_id,
        "generation": page.generation,
        "user": page.user,
        "state": job.state if job else None,
        "elapsed_s": job.elapsed_s if job else None,
        "cpus": job.cpus if job else None,
        "memory_mib": page.memory_mib or None,
        "nodes": page.nodes,
        "nodes_reported": len(nodes),
        "so_far": None if used.so_far_s is None else {"age_s": round(used.so_far_s, 1)},
        "total": asdict(used.whole),
        "shared_folders": usagerows.shared_json(used.shared),
        "cpu_efficiency_percent": efficiency(used.whole.cpu_us, _core_us(job, page)),
        "memory_efficiency_percent": efficiency(used.whole.peak_bytes, page.memory_mib << 20),
        "gpus": usagerows.gpus_json(used),
        "steps": [step_json(step) for step in used.steps],
        "guests": [
            *(_guest_json(node.node, guest, None) for node in nodes for guest in node.guests),
            *(_guest_json(one.node, guest, one.age_s) for one in page.so_far for guest in one.guests),
        ],
    }


def _guest_json(node: str, guest: GuestUsage, age_s: float | None) -> dict[str, Any]:
    return {
        "node": node,
        "guest": guest.index,
        "so_far": None if age_s is None else {"age_s": round(age_s, 1)},
        "memory_kib": guest.memory_kib,
        "missing": guest.missing or None,
        "total": asdict(guest.whole),
        "shared_folders": usagerows.shared_json(guest.shared),
        "steps": [step_json(step) for step in guest.steps],
    }
