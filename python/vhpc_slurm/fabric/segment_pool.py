# SPDX-License-Identifier: Apache-2.0
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
from vhpc_slurm.fabric.backend import ByPolicy, FabricFinding, Proof, ProofResults
from vhpc_slurm.fabric.keys import KeySnapshot
from vhpc_slurm.model import Generation


class SegmentPool(ByPolicy):
    """Hands out numbers."""

    def validate(self, snapshot: KeySnapshot) -> None:
        """Refuse to serve while numbers of another kind are in use: nobody would take them off."""
        keys.refuse_other_spaces(self._policy.pool.space, snapshot)

    def apply(self, snapshot: KeySnapshot, *, force: bool = False) -> None:
        """Nothing: nodes do it."""

    def verify(self, generations: Collection[Generation], snapshot: KeySnapshot) -> ProofResults:
        """Nothing can be read back: no port counts as seen."""
        return self._outcomes(generations, snapshot)

    def strip(self, generations: Collection[Generation], snapshot: KeySnapshot) -> ProofResults:
        """Nothing can be read back: all nodes have said that nothing is left, or this was not asked."""
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
        """Numbers in use that the configuration does not hand out any more."""
        del unsure
        return tuple(
            FabricFinding(
                0, f"{numbers.label(assignment.pkey)} of {assignment.generation} is not in the pool"
            )
            for assignment in snapshot.carried()
            if assignment.pkey not in self._policy.pool
        )

    def repair(self, snapshot: KeySnapshot) -> None:
        """Nothing: what is not of the pool any more leaves with its job."""
