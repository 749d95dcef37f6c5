"""A fabric of port tables in memory, which can fail, and under which vhpcd can die."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from vhpc_slurm.errors import FabricError
from vhpc_slurm.fabric import numbers
from vhpc_slurm.fabric.backend import Finding, KeyPolicy, Outcomes, Proof
from vhpc_slurm.fabric.keys import Book, Claim
from vhpc_slurm.model import Allocation, Generation, JobRequest, NetworkIdentity


class Killed(BaseException):
    """vhpcd dies here."""


class Fabric:
    """Hardware: port tables by GUID.  It can fail, and vhpcd can die before or after any of its works."""

    def __init__(self, policy: KeyPolicy) -> None:
        self.policy = policy
        self.tables: dict[int, int] = {}
        self.fails = False
        self.kill_in = 0

    def step(self) -> None:
        if self.kill_in:
            self.kill_in -= 1
            if not self.kill_in:
                raise Killed

    def names(self, claim: Claim) -> Iterable[int]:
        """What tells its ports from all others: GUIDs, or MAC addresses."""
        if numbers.PKEYS.has(claim.pkey):
            return claim.port_guids()
        ranks = range(claim.first_rank, claim.first_rank + claim.ranks)
        return (int(numbers.mac(claim.pkey, 0, rank, 0).replace(":", ""), 16) for rank in ranks)

    def validate(self, book: Book) -> None:
        pass

    def plan(
        self, generation: Generation, request: JobRequest, allocation: Allocation, book: Book
    ) -> tuple[NetworkIdentity, Claim]:
        return self.policy.plan(generation, request, allocation, book)

    def apply(self, book: Book, *, force: bool = False) -> None:
        self.step()
        if self.fails:
            raise FabricError("the fabric will not")
        self.tables = {name: claim.pkey for claim in book.carried() for name in self.names(claim)}
        self.step()

    def verify(self, generations: Collection[Generation], book: Book) -> Outcomes:
        self.step()
        for generation in generations:
            claim = book.must(generation)
            assert {self.tables[name] for name in self.names(claim)} == {claim.pkey}
        return {generation: Proof(book.epoch) for generation in generations}

    def strip(self, generations: Collection[Generation], book: Book) -> Outcomes:
        self.step()
        for generation in generations:
            # a port with a GUID of its own may be another job's by now: its node had said that it is free
            others = {n for one in book.carried() if one.generation != generation for n in self.names(one)}
            assert not self.tables.keys() & set(self.names(book.must(generation))) - others
        return {generation: Proof(book.epoch) for generation in generations}

    def audit(self, book: Book, *, unsure: bool = False) -> tuple[Finding, ...]:
        return ()

    def repair(self, book: Book) -> None:
        self.apply(book)

    def watch(self, notice: Callable[[], None]) -> None:
        pass

    def disturbed(self) -> bool:
        return False
