# SPDX-License-Identifier: Apache-2.0
"""Reading where Slurm's hosts are: ``sinfo`` for nodes, ``scontrol show config`` for controllers.  Pure."""

from __future__ import annotations

import re

from vhpc_slurm.model import NODE_NAME
from vhpc_slurm.slurm.job import SlurmError, SlurmNode

SINFO_FORMAT = "%N|%n|%o"
"""Node name, NodeHostName, NodeAddr: nothing that a node says of itself (sinfo(1), --format)."""

_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9.:_-]{0,252}\Z", re.ASCII)
_CONTROLLER = re.compile(
    r"^SlurmctldHost\[\d+\]\s*=\s*(?P<name>[^\s(]+)(?:\((?P<address>[^)]+)\))?", re.MULTILINE
)
_ADDRESS = re.compile(r"^SlurmctldAddr\s*=\s*(?P<address>[^\s(]+)\s*$", re.MULTILINE)


def parse_nodes(text: str) -> tuple[SlurmNode, ...]:
    """Read what ``sinfo --all --Node --noheader`` prints in SINFO_FORMAT.

    A node of several partitions is there several times.

    Raises:
        SlurmError: a line is none, or names what is no host.
    """
    found: dict[str, SlurmNode] = {}
    for line in text.splitlines():
        words = line.strip().split("|")
        if len(words) != 3 or not NODE_NAME.match(words[0]) or not all(map(_HOST.match, words[1:])):
            raise SlurmError("cannot read the nodes of Slurm", f"sinfo printed {line[:200]!r}")
        found.setdefault(words[0], SlurmNode(words[0], address=words[2], hostname=words[1]))
    return tuple(found.values())


def parse_controllers(text: str) -> tuple[str, ...]:
    """Read ``scontrol show config``: names and addresses of all SlurmctldHost, and SlurmctldAddr.

    Raises:
        SlurmError: it names none.
    """
    found: dict[str, None] = {}
    for match in _CONTROLLER.finditer(text):
        found |= dict.fromkeys(word for word in (match["name"], match["address"]) if word)
    if not found:
        raise SlurmError("cannot read the hosts of slurmctld", "scontrol show config names no SlurmctldHost")
    found |= dict.fromkeys(match["address"] for match in _ADDRESS.finditer(text))
    return tuple(found)
