# SPDX-License-Identifier: Apache-2.0
"""Requests of nodes: they take leases, acknowledge their end, and report timelines and alarms."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from vhpc_slurm.controller.leases import rules
from vhpc_slurm.controller.leases.lifecycle import Lifecycle
from vhpc_slurm.controller.leases.transitions import Unclean
from vhpc_slurm.errors import FabricError
from vhpc_slurm.model import (
    ALARM,
    Alarm,
    Generation,
    LeaseRecord,
    LeaseState,
    NodeReport,
    NodeUsage,
    SshKeys,
    Timeline,
    TunnelKeyPairs,
)

if TYPE_CHECKING:
    from vhpc_slurm.controller.store.port import LeaseStore

log = logging.getLogger("vhpcd")

ALARMS_MAX = 100
ALARMS_S = 7 * 86400.0
"""Alarms older than this are not shown."""


class NodeReports:
    """Leases taken and reports made by nodes; for the database thread only."""

    def __init__(self, store: LeaseStore, lifecycle: Lifecycle, clock: Callable[[], float]) -> None:
        """``clock`` is the wall clock, in seconds since the epoch."""
        self._store = store
        self._lifecycle = lifecycle
        self._clock = clock
        self._alarms = deque(store.alarms(ALARMS_MAX), ALARMS_MAX)

    def take(self, job_id: int, restart: int | None, node: str) -> LeaseRecord | None:
        """Hand the decided lease to a node and record that; None while no lease is decided.

        Raises:
            FabricError: the lease is over, or the job has no part on that node.
        """
        record = self._store.newest(job_id)
        if record is None or record.lease.state is LeaseState.RESERVED:
            return None
        generation = record.lease.generation
        if restart is not None and generation.restart < restart:
            return None
        if restart is not None and generation.restart > restart:
            raise FabricError(f"job {job_id} was restarted", f"its lease is {generation} now")
        if record.lease.state not in rules.DECIDED:
            raise FabricError(
                f"lease {generation} is {record.lease.state}", "the job has ended or was requeued"
            )
        if not any(part.node == node for part in record.lease.allocation.nodes):
            raise FabricError(f"lease {generation} has no part on node {node[:80]}")
        with self._store.transaction():
            self._store.take(generation, node, self._clock())
        return record

    def keep_ssh_keys(self, generation: Generation, keys: SshKeys) -> SshKeys | None:
        """Store keys unless the generation has some; returns the stored ones, None if it is over."""
        with self._store.transaction():
            self._store.ssh_keys.add(generation, keys)
        return self._store.ssh_keys.get(generation)

    def keep_tunnel_keys(self, generation: Generation, keys: TunnelKeyPairs) -> TunnelKeyPairs | None:
        """As ``keep_ssh_keys``."""
        with self._store.transaction():
            self._store.tunnel_keys.add(generation, keys)
        return self._store.tunnel_keys.get(generation)

    def acknowledge(
        self, generation: Generation, node: str, *, clean: bool, note: str, timeline: Timeline | None
    ) -> None:
        """Record whether a node still holds a generation; an unknown generation is no error.

        (A node keeps acknowledgements on disk until vhpcd accepts them. After a
        loss of this database they would stay there if vhpcd refused them.)
        """
        if self._store.state(generation) is None:
            log.warning(
                "%s is unknown; node %s acknowledged it (clean: %s) %s", generation, node, clean, note
            )
            return
        with self._store.transaction():
            self._store.acknowledge(generation, node, clean=clean, note=note, now=self._clock())
            if timeline is not None:
                self._store.report(timeline)
            if not clean:
                self._lifecycle.apply([generation], Unclean(f"{node}: {note}"))
        if not clean:
            log.error("%s not clean on %s: %s", generation, node, note)
        elif note.startswith(ALARM):
            log.error("%s on %s: %s", generation, node, note)
            self._alarm(Alarm(generation.job_id, node, self._clock(), note.removeprefix(ALARM)))
        self._lifecycle.release(generation)

    def keep_usage(self, usage: NodeUsage) -> bool:
        """Store what a node reports; returns whether all nodes that took the lease have reported.

        False for an unknown generation.
        """
        with self._store.transaction():
            self._store.usage.keep(usage)
        return self._store.usage.complete(usage.generation, usage.node)

    def report(self, timeline: Timeline, report: NodeReport | None = None) -> None:
        """Store a node's timeline, and what it tells the job's owner.

        Raises:
            FabricError: the two are of different nodes or generations.
        """
        if report is not None and (report.generation, report.node) != (timeline.generation, timeline.node):
            raise FabricError(f"a report of {report.node[:80]} came with a timeline of {timeline.node[:80]}")
        with self._store.transaction():
            self._store.report(timeline)
            if report is not None:
                self._store.reports.add(report)

    def alarms(self) -> tuple[Alarm, ...]:
        """Alarms of nodes from the last week, newest last."""
        return tuple(alarm for alarm in self._alarms if alarm.time > self._clock() - ALARMS_S)

    def _alarm(self, alarm: Alarm) -> None:
        if not any(replace(old, time=alarm.time) == alarm for old in self._alarms):
            self._alarms.append(alarm)
