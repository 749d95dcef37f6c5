# SPDX-License-Identifier: Apache-2.0
"""The backend ``ethernet``: a VLAN for each job.

There is no subnet manager: the network interface of a node puts the number on every
frame (``node.devices.vf_drivers.Ethernet``), and the guest cannot change it. So there is
nothing that the controller could apply or read back. It guarantees that no two
generations have a number at the same time or shortly after one another: a number is
free when every node has acknowledged that nothing of its guests is left, and after a
quarantine.
"""

from __future__ import annotations

from collections.abc import Collection

from vhpc_slurm.fabric import keys, numbers
from vhpc_slurm.fabric.backend import ByPolicy, FabricFinding, Proof, ProofResults
from vhpc_slurm.fabric.keys import KeySnapshot
from vhpc_slurm.model import Generation


class SegmentPool(ByPolicy):
    """Hands out numbers."""

    def validate(self, snapshot: KeySnapshot) -> None:
        """FabricError while numbers of another kind are in use: this backend could not remove them."""
        keys.refuse_other_spaces(self._policy.pool.space, snapshot)

    def apply(self, snapshot: KeySnapshot, *, force: bool = False) -> None:
        """Nothing: nodes set the numbers."""

    def verify(self, generations: Collection[Generation], snapshot: KeySnapshot) -> ProofResults:
        """Nothing can be read back: no port counts as seen."""
        return self._outcomes(generations, snapshot)

    def strip(self, generations: Collection[Generation], snapshot: KeySnapshot) -> ProofResults:
        """Nothing can be read back; all nodes have reported that nothing is left."""
        return self._outcomes(generations, snapshot)

    def _outcomes(self, generations: Collection[Generation], snapshot: KeySnapshot) -> ProofResults:
        outcomes: ProofResults = {}
        for assignment in map(snapshot.must, generations):
            if self._policy.pool.space.has(assignment.pkey):
                outcomes[assignment.generation] = Proof(
                    snapshot.epoch, absent=assignment.ranks * assignment.rails * assignment.vfs
                )
            else:
                outcomes[assignment.generation] = keys.foreign_assignment(assignment)
        return outcomes

    def audit(self, snapshot: KeySnapshot, *, unsure: bool = False) -> tuple[FabricFinding, ...]:
        """Numbers in use that are not in the configured pool."""
        del unsure
        return tuple(
            FabricFinding(
                0, f"{numbers.label(assignment.pkey)} of {assignment.generation} is not in the pool"
            )
            for assignment in snapshot.carried()
            if assignment.pkey not in self._policy.pool
        )

    def repair(self, snapshot: KeySnapshot) -> None:
        """Nothing: a number outside the pool is released with its job."""
