# SPDX-License-Identifier: Apache-2.0
"""Answers of a guest's agent, as ``channel`` returns them."""

from __future__ import annotations

from typing import NamedTuple

from vhpc_slurm.record import Record


class GuestHello(Record, frozen=True):
    """The agent's description of itself when its port opens."""

    agent_version: str
    boot_id: str
    kernel: str


class GuestInfo(Record, frozen=True):
    """State of a guest.

    ``uptime_s`` counts from its kernel's start; ``locks``: its programs get locks of shared folders from
    the node.
    """

    agent_version: str
    boot_id: str
    kernel: str
    hostname: str
    cpus: int
    memory_kib: int
    sessions: int
    uptime_s: float
    locks: bool = False


class GuestPorts(NamedTuple):
    """A guest's view of the job's fabric.

    Attributes:
        ports: name and port number of each (``mlx5_0:1``), and the place of the job's key in its table.
        interface: that has the address; empty where none was asked for.
    """

    ports: tuple[tuple[str, int], ...]
    interface: str = ""
