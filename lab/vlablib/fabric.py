# SPDX-License-Identifier: Apache-2.0
"""The simulated InfiniBand fabric of `vlab up --fabric`: ibsim and OpenSM on ctl.

Each compute node has two simulated adapters, so that two jobs can share it.
Their GUIDs are fixed, as those of whole adapters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

RUN = "/run/opensm"
NET = "/etc/vlab/fabric.net"
PARTITIONS = "/etc/opensm/partitions.conf"
PORT_MAP = "/etc/vhpc/ports.map"
# separate on each node: tests create the adapters' sysfs files of guests here
HCA = "/hca"
ADAPTERS = 2
_PRELOAD = "/usr/lib/x86_64-linux-gnu/umad2sim/libumad2sim.so"
# the subnet manager and all readers on its host use the subnet manager's adapter
CLIENT = {"LD_PRELOAD": _PRELOAD, "SIM_HOST": "SM"}
_SM_NODE_GUID = 0x0002_C903_0100_0000
_SWITCH_GUID = 0x0002_C903_0200_0000

SERVER_PORT = 7070
"""UDP port of ibsim in its remote mode, which a lab with two controllers needs."""
MANAGER_PORT = 7634
"""TCP port behind which `vhpc fabric manager` runs there."""


def remote_client(server: str) -> dict[str, str]:
    """Environment of a client of an ibsim in remote mode on a host."""
    return {**CLIENT, "IBSIM_SERVER_NAME": server, "IBSIM_SERVER_PORT": str(SERVER_PORT)}


OPENSM_CONF = "force_log_flush TRUE\n"
FIRST_PARTITIONS = "Default=0x7fff, ipoib : ALL=limited, SELF=full ;\n"
READER = "vlab_simulated_fabric"


def reader_code(client: dict[str, str]) -> str:
    """The module that gives the reader of vhpc its environment."""
    return f'''"""Lets the child of vhpc that reads an InfiniBand fabric read the lab's simulated one."""

import os
import sys

if "vhpc_slurm.fabric.smp" in sys.orig_argv and "LD_PRELOAD" not in os.environ:
    os.environ.update({client!r})
    os.chdir("{RUN}/readers")
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
'''


@dataclass(frozen=True)
class Adapter:
    """One adapter of a compute node; the GUID of its port is the node GUID plus one."""

    host: str
    number: int

    @property
    def name(self) -> str:
        """Its name in ibsim."""
        return f"{self.host}-{self.number}"

    @property
    def node_guid(self) -> int:
        """As real GUIDs: 24 bits of an organisation, and its own number."""
        return 0x0002_C903_0000_0000 | int(self.host[1:]) << 8 | self.number << 4


def adapters(nodes: tuple[str, ...]) -> Iterator[Adapter]:
    """All adapters, in the order of their ports on the one switch."""
    return (Adapter(host, number) for host in nodes for number in range(ADAPTERS))


def net(nodes: tuple[str, ...]) -> str:
    """The fabric in ibsim's format."""
    names = [adapter.name for adapter in adapters(nodes)]
    sm = len(names) + 1
    parts = [
        f'caguid={adapter.node_guid:#x}\nCa 1 "{adapter.name}"\n[1] "SW"[{port}]\n'
        for port, adapter in enumerate(adapters(nodes), 1)
    ]
    links = "".join(f'[{port}] "{name}"[1]\n' for port, name in enumerate(names, 1))
    return "\n".join(
        [
            f'caguid={_SM_NODE_GUID:#x}\nCa 1 "SM"\n[1] "SW"[{sm}]\n',
            *parts,
            f'switchguid={_SWITCH_GUID:#x}\nSwitch {sm} "SW"\n{links}[{sm}] "SM"[1]\n',
        ]
    )


def port_map(nodes: tuple[str, ...]) -> str:
    """The port map for vhpcd: the ports of each node."""
    lines = [f"{adapter.host} 0 {adapter.node_guid + 1:#018x}" for adapter in adapters(nodes)]
    return "\n".join(["# NODE RAIL PORT-GUID", *lines]) + "\n"
