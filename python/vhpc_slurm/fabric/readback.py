# SPDX-License-Identifier: Apache-2.0
"""Compares port tables with partitions: a proof, or findings.

A port in a partition must have exactly its keys; every other port must have the
default key only, as a limited member. The port of the master subnet manager, and only
it, must be a full member of the default partition.

Whether a generation's ports have their keys is proven by their own tables, read now, and
those of all other ports, which may have been read some seconds ago: OpenSM gives a key to
the ports in its file only, and an audit of all ports follows each change. Whether a key is
gone is proven by all tables.
"""
# Decision: A start reads the tables of its own ports

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Set
from dataclasses import dataclass, replace
from typing import Protocol

from vhpc_slurm.errors import FabricError
from vhpc_slurm.fabric import keys, numbers
from vhpc_slurm.fabric.backend import FabricFinding, Proof, ProofResults
from vhpc_slurm.fabric.keys import KeyAssignment, KeySnapshot
from vhpc_slurm.fabric.numbers import DEFAULT_PKEY, FULL
from vhpc_slurm.fabric.partitions import IbPartition
from vhpc_slurm.fabric.smp import Port, Scan

POLL_S = 0.01
SCAN_S = 1.0
"""The least time for a scan in seconds, also when it begins at the deadline."""
SHOWN = 3
"""Findings that one line shows."""

_Judge = Callable[[KeyAssignment], Proof | list[FabricFinding]]


class Reader(Protocol):
    """The port to a reader of port tables."""

    def look_ahead(self) -> None:
        """A scan follows soon: begin to find the ports now, in the background."""

    def scan(self, timeout_s: float) -> Scan:
        """Read everything once; FabricError when it cannot be read."""

    def ports(self, guids: Collection[int], timeout_s: float) -> tuple[Port, ...]:
        """Read the tables of some ports, without those that are not where they were at the last scan."""


class Expected:
    """The entries that each port must have for the given partitions."""

    def __init__(self, partitions: Iterable[IbPartition]) -> None:
        self._entries: dict[int, set[int]] = {}
        for one in partitions:
            if one.pkey == DEFAULT_PKEY:
                continue
            for member, full in one.members:
                self._entries.setdefault(int(member, 16), set()).add(one.pkey | (FULL if full else 0))

    def differences(self, scan: Scan) -> list[Difference]:
        """All ports that have more or less than they should, and all that could not be read."""
        found = []
        for port in scan.ports:
            meant, has = self._entries.get(port.guid, _NONE), set(port.pkeys)
            expected = meant | {DEFAULT_PKEY | FULL if port.master else DEFAULT_PKEY}
            if has != expected:
                keys = frozenset(entry & ~FULL for entry in meant | has) - {DEFAULT_PKEY}
                what = _unlike(port, expected)
                one = FabricFinding(port.guid, what, open=bool(has - expected), lost=not meant <= has)
                found.append(Difference(one, keys))
        if scan.silent:
            what = f"{scan.silent} nodes do not answer"
            if scan.silent_at:
                what += f"; try: smpquery -D nodeinfo {scan.silent_at[0]}"
            found.append(Difference(FabricFinding(0, what, unread=True, blind=True), None))
        found += [Difference(FabricFinding(0, what, unread=True, blind=True), None) for what in scan.unread]
        return found

    def wrong_ports(self, scan: Scan) -> tuple[Port, ...]:
        """The ports among these differences."""
        wrong = {one.finding.port_guid for one in self.differences(scan)}
        return tuple(port for port in scan.ports if port.guid in wrong)

    def entries(self, guid: int) -> int:
        """How many keys a port should have, including the default one."""
        return len(self._entries.get(guid, _NONE)) + 1


_NONE: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Difference:
    """A finding, and the keys that it leaves unproven; None: all keys."""

    finding: FabricFinding
    keys: frozenset[int] | None

    def concerns(self, pkey: int) -> bool:
        """Whether that key is not proven."""
        return self.keys is None or pkey in self.keys


def _unlike(port: Port, expected: Set[int]) -> str:
    has = " ".join(f"{entry:#06x}" for entry in port.pkeys) or "none"
    should = " ".join(f"{entry:#06x}" for entry in sorted(expected))
    return f"port {port.guid:#018x} has the keys {has}, and should have {should}"


class Readback:
    """Reads the fabric until a proof succeeds or a deadline passes."""

    def __init__(self, reader: Reader, timeout_s: float, fresh_s: float = 0.0) -> None:
        """``fresh_s`` is how long tables that were read prove that ports do not have a new key."""
        self._reader = reader
        self._timeout_s = timeout_s
        self._fresh_s = fresh_s
        self._last: Scan | None = None
        self._last_at = float("-inf")

    def look_ahead(self, coming: Iterable[KeyAssignment] = ()) -> None:
        """The fabric is being changed and will be read: find its ports meanwhile.

        ``coming`` are the assignments that will be proven first; none: all ports will be read.
        """
        if self._known(_ports_of(coming)) is None:
            self._reader.look_ahead()

    def carried(
        self, assignments: Iterable[KeyAssignment], partitions: Iterable[IbPartition], snapshot: KeySnapshot
    ) -> ProofResults:
        """Prove that each assignment's ports have exactly their keys and that no other port has them.

        Raises:
            FabricError: the fabric cannot be read.
        """
        expected = Expected(partitions)
        assignments = tuple(assignments)

        def prove(scan: Scan, earlier: int) -> _Judge:
            wrong = expected.differences(scan)
            guids = frozenset(port.guid for port in scan.ports)

            def judge(assignment: KeyAssignment) -> Proof | list[FabricFinding]:
                found = [one.finding for one in wrong if one.concerns(assignment.pkey)]
                if found:
                    return found
                mine = list(assignment.port_guids())
                seen = sum(guid in guids for guid in mine)
                now = len(scan.ports) - earlier
                return Proof(snapshot.epoch, now, seen, len(mine) - seen, earlier)

            return judge

        what = "the fabric does not carry key {:#06x} of {}"
        return self._until(assignments, prove, what, _ports_of(assignments))

    def gone(
        self, assignments: Iterable[KeyAssignment], partitions: Iterable[IbPartition], snapshot: KeySnapshot
    ) -> ProofResults:
        """Prove that no port has the key of these assignments any more.

        ``partitions`` do not contain these assignments; other assignments of the same key may remain.

        Raises:
            FabricError: the fabric cannot be read.
        """
        expected = Expected(partitions)

        def prove(scan: Scan, _earlier: int) -> _Judge:
            wrong = expected.differences(scan)
            carriers: dict[int, set[int]] = {}
            for port in scan.ports:
                for entry in port.pkeys:
                    carriers.setdefault(entry & ~FULL, set()).add(port.guid)

            def judge(assignment: KeyAssignment) -> Proof | list[FabricFinding]:
                having = carriers.get(assignment.pkey, set())
                still = sorted(having & frozenset(assignment.port_guids()))
                found = [FabricFinding(guid, f"port {guid:#018x} has it", True) for guid in still] or [
                    one.finding
                    for one in wrong
                    if one.concerns(assignment.pkey)
                    and (one.finding.port_guid in having or not one.finding.port_guid)
                ]
                return found or Proof(snapshot.epoch, len(scan.ports))

            return judge

        return self._until(assignments, prove, "key {:#06x} of {} is still on the fabric")

    def scan(self) -> Scan:
        """Read everything once; FabricError when it cannot be read."""
        return self._scan(self._timeout_s)

    def _scan(self, timeout_s: float) -> Scan:
        self._last = None
        began = time.monotonic()
        scan = self._reader.scan(timeout_s)
        if not scan.silent and not scan.unread:
            self._last, self._last_at = scan, began
        return scan

    def _known(self, guids: Set[int]) -> Scan | None:
        """The last scan, if it is young enough and has these ports; None: all has to be read."""
        last = self._last
        if last is None or not guids or time.monotonic() - self._last_at > self._fresh_s:
            return None
        return last if guids <= {port.guid for port in last.ports} else None

    def _with_ports(self, guids: Set[int], timeout_s: float) -> Scan | None:
        """The last scan with the tables of these ports as they are now; None: all has to be read."""
        last = self._known(guids)
        if last is None:
            return None
        try:
            now = {port.guid: port for port in self._reader.ports(guids, timeout_s)}
        except FabricError:
            return None
        if now.keys() != guids:
            return None
        self._last = replace(last, ports=tuple(now.get(port.guid, port) for port in last.ports))
        return self._last

    def findings(
        self, partitions: Iterable[IbPartition], only: Set[int] | None = None
    ) -> list[FabricFinding]:
        """Compare the whole fabric, once; a failure to read it is a finding.

        ``only`` are the keys that are compared, besides the default one; None: all.
        """
        try:
            scan = self.scan()
        except FabricError as err:
            return [FabricFinding(0, err.line(), unread=True, blind=True)]
        if only is not None:
            judged = only | {DEFAULT_PKEY}
            scan = replace(
                scan,
                ports=tuple(
                    replace(port, pkeys=tuple(one for one in port.pkeys if one & ~FULL in judged))
                    for port in scan.ports
                ),
            )
        return [one.finding for one in Expected(partitions).differences(scan)]

    def _until(
        self,
        assignments: Iterable[KeyAssignment],
        prove: Callable[[Scan, int], _Judge],
        what: str,
        first: Set[int] = frozenset(),
    ) -> ProofResults:
        """Read until all is proven or the deadline passes; each assignment gets a proof or the reason.

        ``first`` are the ports whose tables may suffice. ``prove`` also gets the number of ports whose
        tables are older.
        """
        outcomes: ProofResults = {}
        left = list(assignments)
        deadline = time.monotonic() + self._timeout_s
        for assignment in tuple(left):
            if not numbers.PKEYS.has(assignment.pkey):
                outcomes[assignment.generation] = keys.foreign_assignment(assignment)
                left.remove(assignment)
        while left:
            left_s = max(SCAN_S, deadline - time.monotonic())
            some = self._with_ports(first, left_s)
            scan = some or self._scan(left_s)
            if scan.unread:
                raise FabricError("a part of the fabric cannot be read", scan.unread[0])
            judge = prove(scan, len(scan.ports) - len(first) if some else 0)
            first = frozenset()
            over = time.monotonic() >= deadline
            for assignment in tuple(left):
                found = judge(assignment)
                if isinstance(found, Proof):
                    outcomes[assignment.generation] = found
                    left.remove(assignment)
                elif over:
                    outcomes[assignment.generation] = _unproven(
                        what.format(assignment.pkey, assignment.generation), found
                    )
            if over:
                break
            if left:
                time.sleep(POLL_S)
        return outcomes


def _ports_of(assignments: Iterable[KeyAssignment]) -> Set[int]:
    return frozenset(guid for one in assignments for guid in one.port_guids())


def _unproven(what: str, found: list[FabricFinding]) -> FabricError:
    why = "; ".join(one.what for one in found[:SHOWN])
    more = f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return FabricError(what, why + more, "see: vhpc fabric ls, and the log of the subnet manager")
