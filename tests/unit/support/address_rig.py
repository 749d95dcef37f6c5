# SPDX-License-Identifier: Apache-2.0
"""A Slurm that says where its hosts are, and a resolver that knows them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vhpc_slurm.config.controller import Controller
from vhpc_slurm.controller.api.addresses import HostAddresses
from vhpc_slurm.slurm.hosts import parse_controllers, parse_nodes
from vhpc_slurm.slurm.port import SlurmError, SlurmNode

# As Debian's Slurm 24.11.5 prints them; a node of two partitions is there twice.
SINFO = "n1|n1|10.77.0.11\nn1|n1|10.77.0.11\nn2|host2|n2-admin\n"
CONFIG = """\
Configuration data as of 2026-11-22T07:26:58
SlurmUser               = slurm(64030)
SlurmctldAddr           = (null)
SlurmctldDebug          = verbose
SlurmctldHost[0]        = ctl
SlurmctldHost[1]        = ctl2(10.77.0.9)
SlurmctldLogFile        = /var/log/slurm/slurmctld.log
"""
NAMES = {
    "n1": {"10.77.0.11"},
    "host2": {"10.77.0.12"},
    "n2-admin": {"10.78.0.12"},
    "n1-ib": {"10.79.0.11"},
    "ctl": {"10.77.0.2", "fd00::2"},
    "ctl2": {"10.77.0.3"},
}


def known_names(name: str) -> frozenset[str]:
    return frozenset(NAMES.get(name, {name} if name[0].isdigit() else ()))


@dataclass
class Asked:
    """A Slurm that says where its hosts are."""

    nodes_: list[SlurmNode] = field(default_factory=lambda: list(parse_nodes(SINFO)))
    fails: str = ""
    count: int = 0

    def nodes(self) -> tuple[SlurmNode, ...]:
        self.count += 1
        if self.fails:
            raise SlurmError("sinfo failed", self.fails)
        return tuple(self.nodes_)

    def controllers(self) -> tuple[str, ...]:
        return parse_controllers(CONFIG)


def hosts(folder: Path, slurm: Asked | None = None, underlay: str = "", **settings: Any) -> HostAddresses:
    asked: Any = slurm or Asked()
    controller = Controller(database=str(folder / "db"), **settings)
    return HostAddresses(controller, asked, underlay=underlay, resolve=known_names)
