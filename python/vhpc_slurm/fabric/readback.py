"""From partitions and port tables to a proof, or to what is wrong.

A port that the partitions name must have exactly its keys; every other port the
default one, as a limited member.  Only the port that the master subnet manager
is at may be a full member of the default partition, and has to be.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Protocol

from vhpc_slurm.errors import FabricError
from vhpc_slurm.fabric.backend import Finding, Proof
from vhpc_slurm.fabric.keys import DEFAULT_PKEY, FULL, Book, Claim
from vhpc_slurm.fabric.partitions import Partition
from vhpc_slurm.fabric.smp import Port, Scan

POLL_S = 0.02
SCAN_S = 1.0
"""Seconds that a scan has at least, also when it begins at the deadline."""
SHOWN = 3
"""So many of what is wrong go into one line."""


class Reader(Protocol):
    """Whatever can read the tables of a fabric."""

    def scan(self, timeout_s: float) -> Scan:
        """Read everything once; FabricError when it cannot be read."""


def differences(partitions: Iterable[Partition], scan: Scan, *, of_key: int | None = None) -> list[Finding]:
    """What the fabric has that it should not, or lacks; pure.

    With ``of_key`` only what concerns that key: its members' whole tables, and
    whether any other port has it.
    """
    meant: dict[int, set[int]] = {}
    members: set[int] = set()
    for one in partitions:
        if one.pkey == DEFAULT_PKEY:
            continue
        for member, full in one.members:
            guid = int(member, 16)
            meant.setdefault(guid, set()).add(one.pkey | (FULL if full else 0))
            if one.pkey == of_key:
                members.add(guid)
    found = []
    for port in scan.ports:
        base = DEFAULT_PKEY | FULL if port.master else DEFAULT_PKEY
        expected = meant.get(port.guid, set()) | {base}
        has = set(port.pkeys)
        if of_key is None or port.guid in members:
            wrong = has != expected
        else:
            wrong = any(entry & ~FULL == of_key for entry in has)
        if wrong:
            found.append(Finding(port.guid, _unlike(port, expected)))
    if scan.silent:
        found.append(Finding(0, f"{scan.silent} nodes do not answer"))
    return found


def _unlike(port: Port, expected: set[int]) -> str:
    has = " ".join(f"{entry:#06x}" for entry in port.pkeys) or "none"
    should = " ".join(f"{entry:#06x}" for entry in sorted(expected))
    return f"port {port.guid:#018x} has the keys {has}, and should have {should}"


class Readback:
    """Proofs with a deadline."""

    def __init__(self, reader: Reader, timeout_s: float) -> None:
        self._reader = reader
        self._timeout_s = timeout_s

    def carried(self, claim: Claim, partitions: tuple[Partition, ...], book: Book) -> Proof:
        """Prove that a claim's ports have exactly their keys and that no stranger has its key.

        Raises:
            FabricError: that was not so at any time before the deadline.
        """
        what = f"the fabric does not carry key {claim.pkey:#06x} of {claim.generation}"
        scan = self._until(lambda scan: differences(partitions, scan, of_key=claim.pkey), what)
        tables = scan.tables()
        mine = list(claim.port_guids())
        seen = sum(guid in tables for guid in mine)
        return Proof(book.epoch, len(scan.ports), seen, len(mine) - seen)

    def gone(self, claim: Claim, partitions: tuple[Partition, ...], book: Book) -> Proof:
        """Prove that no port of a claim, and no stranger, has its key any more.

        ``partitions`` are those without the claim; other claims of the same key may stay.

        Raises:
            FabricError: some port had it until the deadline.
        """
        what = f"key {claim.pkey:#06x} of {claim.generation} is still on the fabric"
        mine = frozenset(claim.port_guids())

        def left(scan: Scan) -> list[Finding]:
            others = differences(partitions, scan, of_key=claim.pkey)
            carriers = {
                port.guid for port in scan.ports if any(entry & ~FULL == claim.pkey for entry in port.pkeys)
            }
            still = [Finding(guid, f"port {guid:#018x} has it") for guid in sorted(carriers & mine)]
            return still or [one for one in others if one.port_guid in carriers or not one.port_guid]

        scan = self._until(left, what)
        return Proof(book.epoch, len(scan.ports))

    def findings(self, partitions: tuple[Partition, ...]) -> list[Finding]:
        """Compare the whole fabric, once."""
        return differences(partitions, self._reader.scan(self._timeout_s))

    def _until(self, wrong: Callable[[Scan], list[Finding]], what: str) -> Scan:
        deadline = time.monotonic() + self._timeout_s
        while True:
            scan = self._reader.scan(max(SCAN_S, deadline - time.monotonic()))
            found = wrong(scan)
            if not found:
                return scan
            if time.monotonic() >= deadline:
                why = "; ".join(one.what for one in found[:SHOWN])
                more = f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
                raise FabricError(what, why + more, "see: vhpc fabric ls, and the log of the subnet manager")
            time.sleep(POLL_S)
