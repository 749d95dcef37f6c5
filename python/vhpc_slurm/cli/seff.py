# SPDX-License-Identifier: Apache-2.0
"""vhpc seff: what the programs of an ended job have used in its guests, and how much of what it asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from vhpc_slurm import slurm
from vhpc_slurm.cli import output, usagerows
from vhpc_slurm.cli.usagerows import UNKNOWN, size_text, step_json, time_text
from vhpc_slurm.config import Config
from vhpc_slurm.errors import UserError
from vhpc_slurm.model import JobUsage, NodeUsage, job_usage
from vhpc_slurm.slurm.port import SlurmError

if TYPE_CHECKING:
    from vhpc_slurm.controller.api.usage_messages import UsagePage
    from vhpc_slurm.slurm.sacct import AccountedJob


def seff(config: Config, job_id: int, *, as_json: bool) -> int:
    """Show the figures of a job's last run.

    Raises:
        UserError: vhpcd has no such job of this user, or no node has reported yet.
        FabricError: vhpcd cannot be reached.
    """
    from vhpc_slurm.controller.client import ControllerClient

    page, nodes = ControllerClient(config).usage(job_id)
    if not nodes:
        raise UserError(
            f"no node has reported what job {job_id} has used",
            "nodes report when the job ends; one without guests has nothing to report",
            f"see: scontrol show job {job_id}",
        )
    job = _accounted(config, job_id)
    used = job_usage(nodes)
    if as_json:
        output.write_json(_json(job_id, page, nodes, used, job))
        return 0
    output.write_facts(_facts(job_id, page, used, job))
    print()
    usagerows.table(used)
    if len(nodes) < page.taken:
        print(f"nodes that have not reported: {page.taken - len(nodes)}")
    return 0


def efficiency(part: int | None, whole: float) -> float | None:
    """Per cent; None if one of the two is not known."""
    return None if part is None or whole <= 0 else 100.0 * part / whole


def _accounted(config: Config, job_id: int) -> AccountedJob | None:
    try:
        return slurm.accounting(config).job(job_id)
    except SlurmError:
        return None  # the figures themselves do not need it


def _core_us(job: AccountedJob | None) -> int:
    return 0 if job is None else job.cpus * job.elapsed_s * 1_000_000


def _facts(job_id: int, page: UsagePage, used: JobUsage, job: AccountedJob | None) -> list[tuple[str, str]]:
    whole, core_us, memory = used.whole, _core_us(job), page.memory_mib << 20
    facts = [
        ("Job ID", f"{job_id} (generation {page.generation})"),
        ("User", page.user),
        ("State", UNKNOWN if job is None else job.state),
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
        "total": asdict(used.whole),
        "cpu_efficiency_percent": efficiency(used.whole.cpu_us, _core_us(job)),
        "memory_efficiency_percent": efficiency(used.whole.peak_bytes, page.memory_mib << 20),
        "steps": [step_json(step) for step in used.steps],
        "guests": [
            {
                "node": node.node,
                "guest": guest.index,
                "memory_kib": guest.memory_kib,
                "missing": guest.missing or None,
                "total": asdict(guest.whole),
                "steps": [step_json(step) for step in guest.steps],
            }
            for node in nodes
            for guest in node.guests
        ],
    }
