# SPDX-License-Identifier: Apache-2.0
"""A fabric of port tables in memory, which can fail, and under which vhpcd can die."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from vhpc_slurm.errors import FabricError
from vhpc_slurm.fabric import numbers
from vhpc_slurm.fabric.backend import ByPolicy, FabricFinding, KeyPolicy, Proof, ProofResults
from vhpc_slurm.fabric.keys import KeyAssignment, KeySnapshot
from vhpc_slurm.model import Generation


class Killed(BaseException):
    """vhpcd dies here."""


class Fabric(ByPolicy):
    """Hardware: port tables by GUID.  It can fail, and vhpcd can die before or after any of its works."""

    def __init__(self, policy: KeyPolicy) -> None:
        super().__init__(policy)
        self.tables: dict[int, int] = {}
        self.fails = False
        self.kill_in = 0

    def step(self) -> None:
        if self.kill_in:
            self.kill_in -= 1
            if not self.kill_in:
                raise Killed

    def names(self, assignment: KeyAssignment) -> Iterable[int]:
        """Identities of its ports: GUIDs, or MAC addresses."""
        if numbers.PKEYS.has(assignment.pkey):
            return assignment.port_guids()
        ranks = range(assignment.first_rank, assignment.first_rank + assignment.ranks)
        return (int(numbers.mac(assignment.pkey, 0, rank, 0).replace(":", ""), 16) for rank in ranks)

    def validate(self, snapshot: KeySnapshot) -> None:
        pass

    def apply(self, snapshot: KeySnapshot, *, force: bool = False) -> None:
        self.step()
        if self.fails:
            raise FabricError("the fabric will not")
        self.tables = {
            name: assignment.pkey for assignment in snapshot.carried() for name in self.names(assignment)
        }
        self.step()

    def verify(self, generations: Collection[Generation], snapshot: KeySnapshot) -> ProofResults:
        self.step()
        for generation in generations:
            assignment = snapshot.must(generation)
            assert {self.tables[name] for name in self.names(assignment)} == {assignment.pkey}
        return {generation: Proof(snapshot.epoch) for generation in generations}

    def strip(self, generations: Collection[Generation], snapshot: KeySnapshot) -> ProofResults:
        self.step()
        for generation in generations:
            # a port with a GUID of its own may be another job's by now: its node had said that it is free
            others = {
                n for one in snapshot.carried() if one.generation != generation for n in self.names(one)
            }
            assert not self.tables.keys() & set(self.names(snapshot.must(generation))) - others
        return {generation: Proof(snapshot.epoch) for generation in generations}

    def audit(self, snapshot: KeySnapshot, *, unsure: bool = False) -> tuple[FabricFinding, ...]:
        return ()

    def repair(self, snapshot: KeySnapshot) -> None:
        self.apply(snapshot)


def generation(number: int) -> Generation:
    return Generation(number, 0, f"{number:08x}")


def an_assignment(number: int = 1, **other: object) -> KeyAssignment:
    return replace(
        KeyAssignment(generation(number), 0x1000, f"job {number}", 0, 2, 1, 1),
        **other,  # type: ignore[arg-type]
    )
