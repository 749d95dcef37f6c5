# SPDX-License-Identifier: Apache-2.0
"""vhpc image warm with images.peer_port: nodes get an image from each other, as those of a job do.

Nodes of a job start together and ask each other in the order of their lease. The jobs of a warming
start when their nodes have room. So the command tells each node, when its job has started, which node
it asks, and lets a node end when no node asks it any more. Command and nodes exchange lines of JSON
over the pipes of an srun.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

from vhpc_slurm.node.store.peers.offers import RUN
from vhpc_slurm.node.store.peers.tree import FANOUT
from vhpc_slurm.slurm import noderuns
from vhpc_slurm.slurm.noderuns import Ended, NodeRuns, Place, Run
from vhpc_slurm.undecodable import UNDECODABLE

OPTION = "--peers"
"""Of vhpc image stage, which then reads ``Begin`` and ``Sources``, and writes ``Joined`` and its result."""
NODES_MAX = 32 << 10
"""Longest text of a host list that is passed on: more does not fit into a pipe at once."""
LIFETIMES = 3
"""The longest life of a node's job, in deadlines of a copy: it copies, and serves others that copy."""

Text = Annotated[str, msgspec.Meta(max_length=256)]


class Begin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first line to a node: the name of the run, the node's own name, and the nodes that may ask it."""

    run: Annotated[str, msgspec.Meta(pattern="^" + RUN.pattern)]  # msgspec searches for it anywhere
    node: Text
    nodes: Annotated[str, msgspec.Meta(max_length=NODES_MAX)]


class Joined(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The answer: whether others can ask the node."""

    serves: bool


class Sources(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The second line to a node: the nodes that it asks, in this order; if empty, it reads the catalogue."""

    sources: tuple[Text, ...]


@dataclass
class _Member:
    """A node that copies, or has copied and serves."""

    serves: bool
    sources: tuple[str, ...]
    copied: bool = False


class Relay:
    """Which nodes a node asks, and which nodes may end.  Pure."""

    def __init__(self) -> None:
        self._members: dict[str, _Member] = {}
        self._seed = ""
        """The node that has copied last, of those that serve: whoever comes later may ask it."""

    def join(self, node: str, *, serves: bool) -> tuple[str, ...]:
        """A node is there; returns the nodes that it asks, the parent first.

        A node that has the image is a better parent than one that copies; of equal ones the first counts.
        """
        places = [
            (self._asked(name) >= FANOUT, not one.copied, place, name)
            for place, (name, one) in enumerate(self._members.items())
            if one.serves
        ]
        sources: tuple[str, ...] = ()
        if places:
            parent = min(places)[-1]
            above = (name for name in self._members[parent].sources if name in self._members)
            sources = (parent, *above)
        self._members[node] = _Member(serves, sources)
        return sources

    def copied(self, node: str) -> None:
        """A node has the image."""
        self._members[node].copied = True
        if self._members[node].serves:
            self._seed = node

    def gone(self, node: str) -> None:
        """A node has ended, also one that has not joined."""
        self._members.pop(node, None)

    def unneeded(self, *, more: bool) -> list[str]:
        """Nodes that have the image and that no node asks; ``more``: others will still join."""
        return [
            name
            for name, one in self._members.items()
            if one.copied and not self._asked(name) and not (more and name == self._seed)
        ]

    def _asked(self, node: str) -> int:
        """How many nodes copy from a node."""
        return sum(not one.copied and one.sources[:1] == (node,) for one in self._members.values())


def copy(
    runs: NodeRuns,
    places: Sequence[Place],
    command: Sequence[str],
    nodes: str,
    *,
    parallel: int,
    timeout_s: int,
    memory_mib: int,
) -> Generator[Ended, None, None]:
    """Run ``vhpc image stage --peers`` on nodes, as ``NodeRuns.run``, and yield the end of each copy.

    Nodes that serve others stay in addition to the ``parallel`` ones that copy. All are ended if the
    iterator is closed or left by an exception.

    Args:
        runs: starts the commands.
        places: the nodes.
        command: program and arguments, without ``OPTION``.
        nodes: the host list that has them all.
        parallel: how many nodes copy at once.
        timeout_s: how long a copy may take.
        memory_mib: memory of the command on a node.

    Raises:
        SlurmError: there is no srun.
    """
    name = f"warm-{secrets.token_hex(16)}"
    waiting, jobs = list(reversed(places)), _Jobs()
    try:
        while waiting or jobs.copying or jobs.serving:
            while waiting and len(jobs.copying) < parallel:
                place = waiting.pop()
                with noderuns.interrupt_deferred():
                    run = runs.start(
                        place,
                        [*command, OPTION],
                        timeout_s=LIFETIMES * timeout_s,
                        memory_mib=memory_mib,
                        talks=True,
                    )
                    jobs.copying[place.node] = run
                run.tell(msgspec.json.encode(Begin(name, place.node, nodes)))
            ended = jobs.look()
            yield from ended
            jobs.let_go(more=bool(waiting))
            if not ended:
                time.sleep(noderuns.POLL_S)
    finally:
        noderuns.end([*jobs.copying.values(), *jobs.serving.values()])


class _Jobs:
    """The jobs on nodes: those that will copy or copy, and those that have copied and serve."""

    def __init__(self) -> None:
        self.copying: dict[str, Run] = {}
        self.serving: dict[str, Run] = {}
        self._joined: set[str] = set()
        self._relay = Relay()

    def look(self) -> list[Ended]:
        """Answer nodes that have joined; returns the copies that have ended since."""
        found = []
        for node, run in list(self.copying.items()):
            over, lines = run.has_ended(), run.lines
            if lines and node not in self._joined:
                self._joined.add(node)
                sources = self._relay.join(node, serves=_serves(lines[0]))
                run.tell(msgspec.json.encode(Sources(sources)))
            if len(lines) > 1:
                self._relay.copied(node)
                self.serving[node] = self.copying.pop(node)
                found.append(Ended(node, lines[1]))
            elif over:
                self._relay.gone(node)
                found.append(self.copying.pop(node).result())
        for node, run in list(self.serving.items()):
            if run.has_ended():
                self._relay.gone(node)
                self.serving.pop(node).result()
        return found

    def let_go(self, *, more: bool) -> None:
        """End nodes that no other node needs any more; ``more``: others will be started."""
        for node in self._relay.unneeded(more=more or not self._joined.issuperset(self.copying)):
            self._relay.gone(node)
            self.serving[node].dismiss()


def _serves(line: bytes) -> bool:
    try:
        return msgspec.json.decode(line, type=Joined).serves
    except UNDECODABLE:
        return False
