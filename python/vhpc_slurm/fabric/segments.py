"""The backends ``ethernet`` and ``vxlan``: a VLAN, or a VXLAN network identifier, for each job.

No subnet manager stands between hosts and wire here: a node's own network
interface puts the number on every frame (``node.vf_drivers.Ethernet``), and the
guest cannot change it.  So there is nothing that the controller could apply or
read.  What it can promise is that no two generations have a number at the same
time, nor one soon after the other: a number is handed on when every node has
acknowledged that nothing of its guests is left, and after a quarantine.

For a VNI nothing on the nodes does the like yet.
"""

from __future__ import annotations

from collections.abc import Collection

from vhpc_slurm.fabric import keys, numbers
from vhpc_slurm.fabric.backend import ByPolicy, Finding, Outcomes, Proof
from vhpc_slurm.fabric.keys import Book
from vhpc_slurm.model import Generation


class Segments(ByPolicy):
    """Hands out numbers."""

    def validate(self, book: Book) -> None:
        """Refuse to serve while numbers of another kind are in use: nobody would take them off."""
        keys.refuse_strangers(self._policy.pool.space, book)

    def apply(self, book: Book, *, force: bool = False) -> None:
        """Nothing: nodes do it."""

    def verify(self, generations: Collection[Generation], book: Book) -> Outcomes:
        """Nothing can be read back: no port counts as seen."""
        return self._outcomes(generations, book)

    def strip(self, generations: Collection[Generation], book: Book) -> Outcomes:
        """Nothing can be read back: all nodes have said that nothing is left, or this was not asked."""
        return self._outcomes(generations, book)

    def _outcomes(self, generations: Collection[Generation], book: Book) -> Outcomes:
        outcomes: Outcomes = {}
        for claim in map(book.must, generations):
            if self._policy.pool.space.has(claim.pkey):
                outcomes[claim.generation] = Proof(book.epoch, absent=claim.ranks * claim.rails * claim.vfs)
            else:
                outcomes[claim.generation] = keys.another_s(claim)
        return outcomes

    def audit(self, book: Book, *, unsure: bool = False) -> tuple[Finding, ...]:
        """Numbers in use that the configuration does not hand out any more."""
        del unsure
        return tuple(
            Finding(0, f"{numbers.label(claim.pkey)} of {claim.generation} is not of the pool")
            for claim in book.carried()
            if claim.pkey not in self._policy.pool
        )

    def repair(self, book: Book) -> None:
        """Nothing: what is not of the pool any more leaves with its job."""
