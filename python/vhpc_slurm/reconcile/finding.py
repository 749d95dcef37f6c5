# SPDX-License-Identifier: Apache-2.0
"""The result of a finding: whether it was repaired, and whether the node is drained."""

from __future__ import annotations

from vhpc_slurm.errors import VhpcError
from vhpc_slurm.node.finding import Kind, NodeFinding
from vhpc_slurm.record import Record

NEVER_DRAIN = frozenset(
    {
        Kind.CONTROLLER,
        Kind.OUTBOX,
        Kind.REFUSED_ACKNOWLEDGEMENT,
        Kind.LOST_START,
        Kind.LEFT_NODE,
        Kind.LIBVIRT_BUSY,
        Kind.LOST_KEEPER,
        Kind.LOST_FOLLOWER,
        Kind.ORPHAN_CHECKPOINT,
    }
)
"""Kinds that say nothing against the node itself, or not yet: it stays in service when their repair fails."""


class RepairResult(Record, frozen=True):
    """A finding, and whether it was repaired; ``error`` says why not, empty when nothing was tried."""

    kind: Kind
    what: str
    repaired: bool
    error: str = ""

    @property
    def drains(self) -> bool:
        """Whether the node must be drained because of it."""
        return not self.repaired and self.kind not in NEVER_DRAIN


def repair(finding: NodeFinding, *, check: bool) -> RepairResult:
    """Repair a finding; with ``check`` only report it."""
    if check:
        return RepairResult(finding.kind, finding.what, repaired=False)
    try:
        finding.repair()
    except (VhpcError, OSError) as err:
        line = err.line() if isinstance(err, VhpcError) else str(err)
        return RepairResult(finding.kind, finding.what, repaired=False, error=line)
    return RepairResult(finding.kind, finding.what, repaired=True)
