# SPDX-License-Identifier: Apache-2.0
"""The four kinds of errors.

Each error says what failed, why, and what to do.  The class decides what is
affected: a job, a node, the queue, or a resource.  Only the hooks translate the
class for Slurm (into an exit status, a state file that the SPANK plugin reads).
"""

from __future__ import annotations

from vhpc_slurm.terminal import one_line


class VhpcError(Exception):
    """Base of all errors of this package.

    Attributes:
        what: one clause, no final full stop: what failed.
        why: the known cause, may be empty.
        hint: what the reader can do about it, may be empty.
    """

    kind = "internal"

    def __init__(self, what: str, why: str = "", hint: str = "") -> None:
        super().__init__(what, why, hint)
        self.what = what
        self.why = why
        self.hint = hint

    def __str__(self) -> str:
        return self.line()

    def line(self) -> str:
        """The error as exactly one line, for a log, a drain reason or a user's stderr."""
        text = self.what
        if self.why:
            text += f": {self.why}"
        if self.hint:
            text += f" ({self.hint})"
        return one_line(text)


class UserError(VhpcError):
    """A mistake of the user: the job fails with one line; no node is drained."""

    kind = "user"


class NodeError(VhpcError):
    """A fault of this node: the Prolog fails, Slurm drains the node and requeues the job."""

    kind = "node"


class FabricError(VhpcError):
    """A fault of network or controller: PrologSlurmctld fails, the job is requeued, no node is drained."""

    kind = "fabric"


class TeardownError(VhpcError):
    """A resource could not be verified as clean: the node is drained, the resource quarantined."""

    kind = "teardown"
