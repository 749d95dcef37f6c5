# SPDX-License-Identifier: Apache-2.0
"""The port of the store of leases; ``database`` and ``mariastore`` implement it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from vhpc_slurm.controller.store.checkpoints import CheckpointStore
from vhpc_slurm.controller.store.clusters import ClusterStore
from vhpc_slurm.controller.store.keys import KeyStore
from vhpc_slurm.controller.store.readiness import ReadinessStore
from vhpc_slurm.controller.store.reports import ReportStore
from vhpc_slurm.controller.store.secrets import SecretStore
from vhpc_slurm.controller.store.segments import SegmentStore
from vhpc_slurm.controller.store.usage import UsageStore
from vhpc_slurm.errors import FabricError
from vhpc_slurm.model import (
    Alarm,
    Generation,
    LeaseRecord,
    LeaseState,
    SshKeys,
    Timeline,
    TunnelKeyPairs,
    Viewer,
)

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


class LeaseStore(Protocol):
    """The port.  Changes happen inside ``transaction`` only; unknown generations change nothing."""

    @property
    def keys(self) -> KeyStore:
        """Assignments of partition keys, in the same transactions."""

    @property
    def segments(self) -> SegmentStore:
        """VNIs of job networks, in the same transactions."""

    @property
    def readiness(self) -> ReadinessStore:
        """The nodes' reports to the ready barrier, in the same transactions."""

    @property
    def usage(self) -> UsageStore:
        """The nodes' reports about the usage of generations, in the same transactions."""

    @property
    def reports(self) -> ReportStore:
        """The nodes' reports to the owners of jobs, in the same transactions; deleted with the lease."""

    @property
    def ssh_keys(self) -> SecretStore[SshKeys]:
        """Keys for ssh between guests, in the same transactions; they are deleted when the lease ends."""

    @property
    def tunnel_keys(self) -> SecretStore[TunnelKeyPairs]:
        """Keys of the WireGuard tunnels between nodes, in the same way."""

    @property
    def checkpoints(self) -> CheckpointStore:
        """Checkpoints of jobs, in the same transactions; they outlive their leases."""

    @property
    def clusters(self) -> ClusterStore:
        """Clusters of users and their members, in the same transactions."""

    def transaction(self) -> AbstractContextManager[None]:
        """All changes within are durable at its end, or none is; one within another goes with it.

        RetryError: all of it is undone for a reason that passes, and may be run again.
        """

    def put(self, record: LeaseRecord) -> None:
        """Insert a lease, or replace its lease part; nodes and timelines stay."""

    def take(self, generation: Generation, node: str, now: float) -> None:
        """Record that a node took the lease; this cancels an earlier acknowledgement of the node."""

    def acknowledge(self, generation: Generation, node: str, *, clean: bool, note: str, now: float) -> None:
        """Record the last acknowledgement of a node."""

    def report(self, timeline: Timeline) -> None:
        """Store a timeline, which replaces an earlier one of that node."""

    def get(self, generation: Generation) -> LeaseRecord | None:
        """One lease, without timelines."""

    def state(self, generation: Generation) -> LeaseState | None:
        """The state of a lease; None for an unknown one. The lease itself and its nodes are not read."""

    def has_holders(self, generation: Generation) -> bool:
        """Whether a node that took the lease has not acknowledged that it is clean."""

    def of_job(self, job_id: int) -> tuple[LeaseRecord, ...]:
        """All leases of a job, newest first, without timelines."""

    def newest(self, job_id: int) -> LeaseRecord | None:
        """The newest lease of a job, without acknowledgements: there may be thousands."""

    def live(self) -> tuple[LeaseRecord, ...]:
        """All leases that are not released, oldest first."""

    def ending(self) -> tuple[LeaseRecord, ...]:
        """All leases that are ending, oldest first."""

    def states(self) -> dict[Generation, LeaseState]:
        """The state of each lease that is not released."""

    def released(self, jobs: Iterable[int]) -> tuple[LeaseRecord, ...]:
        """All released leases of some jobs, oldest first."""

    def page(
        self,
        after: int,
        *,
        job_id: int | None = None,
        live: bool = False,
        viewer: Viewer | None = None,
        limit: int = 100,
        before: int | None = None,
    ) -> tuple[tuple[int, LeaseRecord], ...]:
        """Leases with their serial numbers, in order, those above ``after``; only what ``viewer`` may see.

        With ``before`` those below it, newest first.
        """

    def timelines(
        self, after: int, *, job_id: int | None = None, viewer: Viewer | None = None, limit: int = 100
    ) -> tuple[tuple[int, Timeline], ...]:
        """Timelines with their serial numbers, in the same way."""

    def counts(self) -> dict[str, int]:
        """How many leases there are in each state."""

    def alarms(self, limit: int) -> tuple[Alarm, ...]:
        """The newest alarms of nodes, newest last."""

    def prune(self, before: float) -> int:
        """Delete leases released before that time; returns how many."""

    def close(self) -> None:
        """Close the file; nothing is lost without this call."""

    def explain(self, err: Exception) -> FabricError:
        """One of ``errors.ENGINE_ERRORS`` as one line: what it is, and what to do."""
