# SPDX-License-Identifier: Apache-2.0
"""The four kinds of failure, never mixed.

Each error says what happened, why, and what to do about it.  Which class is
raised decides who suffers: a job, a node, the queue, or a resource.  The
hooks translate the class into what Slurm understands (an exit status, a state
file that the SPANK plugin reads); nothing else may.
"""

from __future__ import annotations

from vhpc_slurm.terminal import one_line

UNDECODABLE = (ValueError, RecursionError)
"""What decoders of JSON and TOML raise for bytes that are none, not UTF-8, or nested without end."""


class VhpcError(Exception):
    """Base of all errors of this package.

    Attributes:
        what: one clause, no final full stop: what failed.
        why: the cause as far as it is known, may be empty.
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
        """The error as exactly one line, fit for a log, a drain reason or a user's stderr."""
        text = self.what
        if self.why:
            text += f": {self.why}"
        if self.hint:
            text += f" ({self.hint})"
        return one_line(text)


class UserError(VhpcError):
    """The user's mistake: his job fails with one line; no node is touched by it."""

    kind = "user"


class NodeError(VhpcError):
    """This node cannot do it: Prolog fails, Slurm drains the node and requeues the job."""

    kind = "node"


class FabricError(VhpcError):
    """Network or controller: PrologSlurmctld fails, the job is requeued, no node is drained."""

    kind = "fabric"


class TeardownError(VhpcError):
    """Something could not be proven clean: the node is drained, the resource quarantined."""

    kind = "teardown"
