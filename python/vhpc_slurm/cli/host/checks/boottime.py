# SPDX-License-Identifier: Apache-2.0
"""How long boots take and may take, compared with the timeouts of Slurm for Prolog."""

from __future__ import annotations

import math
from dataclasses import dataclass

from vhpc_slurm.cli.host.checks import CheckResult, ok, warn
from vhpc_slurm.config import Config
from vhpc_slurm.node.store import timeline as stored
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.placement import deadlines
from vhpc_slurm.slurm.port import NodeResources

BOOTS = 50
LONGEST_MESSAGE_S = 100
"""Slurm warns about a longer MessageTimeout."""


@dataclass(frozen=True)
class NodeSize:
    """The resources of a node that decide how long the boot of a guest with all of them may take."""

    gpus: int = 0
    memory_mib: int = 0
    devices: bool = False
    """Whether it has GPUs or virtual functions for guests."""

    @classmethod
    def of(cls, node: NodeResources, config: Config) -> NodeSize:
        """From the node's entry in slurm.conf."""
        gpus = node.gres_count(config.placement.gpu_gres) or 0
        functions = bool(node.gres_count(config.placement.vf_gres) or config.devices.virtual_functions)
        return cls(gpus, node.memory_mib, gpus > 0 or functions)


def boot_budget_s(config: Config, node: NodeSize) -> int:
    """Longest time of a Prolog: the wait for the lease, the longest boot, the stages before it, the check
    of the guests, the barrier.

    One of these stages is QEMU's start, which takes longer the more memory it has to allocate.
    """
    guests = config.guests
    per_gib = deadlines.memory_s_per_gib(
        huge=config.placement.hugepages in ("2M", "1G"),
        perhaps_huge=config.placement.hugepages != "none",
        devices=node.devices,
    )
    start_s = guests.stage_timeout_s + round(node.memory_mib / 1024 * per_gib)
    boot_s = guests.longest_boot_s(node.gpus)
    after_s = guests.check_s + config.network.barrier_s(checked=bool(guests.check))
    return config.controller.lease_wait_s + boot_s + start_s + after_s


def longest_boot_s(layout: Layout) -> float | None:
    """Seconds of the longest of the last successful boots; None without any."""
    files = sorted(layout.timelines.glob("*.json"), key=lambda path: path.stat().st_mtime)[-BOOTS:]
    lines = [line for path in files if (line := stored.read_timeline(path)) is not None]
    return max((took for line in lines if (took := line.ready_s) is not None), default=None)


def message_timeout(seconds: int, longest_s: float | None) -> CheckResult:
    """Whether boots as long as the longest one here cause no warning of Slurm.

    MessageTimeout - 2 s after a Prolog started, slurmd reports to salloc and srun that it hangs.
    """
    name = "slurm.MessageTimeout"
    if longest_s is None:
        return ok(name, f"MessageTimeout={seconds}; no guest has booted here yet")
    if longest_s < seconds - 2:
        return ok(name, f"MessageTimeout={seconds}; boots here took up to {longest_s:.1f} s")
    wanted = min(LONGEST_MESSAGE_S, max(30, 10 * math.ceil((longest_s + 2) / 10 + 1)))
    return warn(
        name,
        f"MessageTimeout={seconds}: salloc and srun print 'Prolog hung on node' after {seconds - 2} s, but "
        f"boots here took up to {longest_s:.1f} s",
        f"MessageTimeout={wanted}, or tell users to ignore the message",
    )
