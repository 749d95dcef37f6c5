# SPDX-License-Identifier: Apache-2.0
"""Parsing what Slurm prints about hosts: ``sinfo``, ``scontrol show node|config|partition``.  Pure."""

from __future__ import annotations

import re

from vhpc_slurm.model import NODE_NAME
from vhpc_slurm.slurm.port import REASON_PREFIX, NodeResources, SlurmError, SlurmNode, SlurmPartition

SINFO_FORMAT = "%N|%n|%o"
"""Node name, NodeHostName, NodeAddr: nothing that a node says of itself (sinfo(1), --format)."""

DRAINED_FORMAT = "%N|%E"
"""Node name and Reason, the text of the user who drained the node."""

_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9.:_-]{0,252}\Z", re.ASCII)
_CONTROLLER = re.compile(
    r"^SlurmctldHost\[\d+\]\s*=\s*(?P<name>[^\s(]+)(?:\((?P<address>[^)]+)\))?", re.MULTILINE
)
_NODE = re.compile(r"^NodeName=(\S+)(?P<rest>.*)$", re.MULTILINE)
_MEMORY = re.compile(r"\sRealMemory=(\d+)")
_GRES = re.compile(r"\sGres=(\S+)")
_ARCH = re.compile(r"\sArch=([a-z0-9_]{1,32})\s", re.ASCII)
# ibvf:8, ibvf:hdr:8(S:0-1), gpu:h200:4,ibvf:8
_COUNT = re.compile(r"(?:^|,)([^:,()]+)(?::[^:,()]+)??:([0-9]+)")
_PARTITION = re.compile(r"^PartitionName=(\S+)(?P<rest>.*)$", re.MULTILINE)
_GRACE = re.compile(r"\sGraceTime=(\d+)\s")
_PREEMPT = re.compile(r"\sPreemptMode=(\S+)")
_ADDRESS = re.compile(r"^SlurmctldAddr\s*=\s*(?P<address>[^\s(]+)\s*$", re.MULTILINE)


def parse_nodes(text: str) -> tuple[SlurmNode, ...]:
    """Parse what ``sinfo --all --Node --noheader`` prints in SINFO_FORMAT.

    sinfo prints a node once for each of its partitions.

    Raises:
        SlurmError: a line has another form, or contains an invalid host name.
    """
    found: dict[str, SlurmNode] = {}
    for line in text.splitlines():
        words = line.strip().split("|")
        if len(words) != 3 or not NODE_NAME.match(words[0]) or not all(map(_HOST.match, words[1:])):
            raise SlurmError("cannot parse Slurm's list of nodes", f"sinfo printed {line[:200]!r}")
        found.setdefault(words[0], SlurmNode(words[0], address=words[2], hostname=words[1]))
    return tuple(found.values())


def parse_drained(text: str) -> frozenset[str]:
    """Parse what ``sinfo --all --Node --noheader --states=drain`` prints in DRAINED_FORMAT.

    Returns:
        The nodes whose Reason is one of vhpc's.
    """
    rows = (line.strip().partition("|") for line in text.splitlines())
    return frozenset(node for node, _, reason in rows if reason.startswith(REASON_PREFIX))


def parse_controllers(text: str) -> tuple[str, ...]:
    """Parse ``scontrol show config``: names and addresses of all SlurmctldHost, and SlurmctldAddr.

    Raises:
        SlurmError: there is no SlurmctldHost.
    """
    found: dict[str, None] = {}
    for match in _CONTROLLER.finditer(text):
        found |= dict.fromkeys(word for word in (match["name"], match["address"]) if word)
    if not found:
        raise SlurmError("cannot find the hosts of slurmctld", "scontrol show config prints no SlurmctldHost")
    found |= dict.fromkeys(match["address"] for match in _ADDRESS.finditer(text))
    return tuple(found)


def parse_node_resources(text: str) -> tuple[NodeResources, ...]:
    """Parse ``scontrol -o show node``: one line per node."""
    found = []
    for match in _NODE.finditer(text):
        memory, gres = _MEMORY.search(match["rest"]), _GRES.search(match["rest"])
        counts = tuple((name, int(count)) for name, count in _COUNT.findall(gres[1] if gres else ""))
        arch = _ARCH.match(match["rest"])  # the first of the fields: later ones have text of the node
        found.append(
            NodeResources(match[1], int(memory[1]) if memory else 0, counts, arch[1] if arch else "")
        )
    return tuple(found)


def parse_partitions(text: str) -> tuple[SlurmPartition, ...]:
    """Parse ``scontrol -o show partition``: one line per partition."""
    found = []
    for match in _PARTITION.finditer(text):
        mode, grace = _PREEMPT.search(match["rest"]), _GRACE.search(match["rest"])
        found.append(SlurmPartition(match[1], mode[1] if mode else "", int(grace[1]) if grace else 0))
    return tuple(found)
