# SPDX-License-Identifier: Apache-2.0
"""Asks vhpcd for everything that a viewer may see; each function blocks and belongs into a thread."""

from __future__ import annotations

import os
import pwd
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from vhpc_slurm.cli.jobs import report
from vhpc_slurm.cli.jobs.reportdata import JobReport
from vhpc_slurm.config import Config
from vhpc_slurm.controller.client import ControllerClient
from vhpc_slurm.controller.store.choice import read_keys
from vhpc_slurm.controller.wire_types import ProgressWire
from vhpc_slurm.errors import UserError, VhpcError
from vhpc_slurm.fabric.keys import KeyAssignment, KeyState
from vhpc_slurm.model import Cluster, ClusterJob, LeaseRecord, LeaseState, NodeReport

if TYPE_CHECKING:
    from vhpc_slurm.controller.api.status_messages import Trouble

ANSWER_S = 5
"""Longest wait for one answer of vhpcd, in seconds."""
REPORTS_EACH = 2
"""Jobs whose nodes' reports are read with one overview: the first overviews of many jobs lack devices."""
REPORTED_JOBS = 1000
REFUSED_S = 60.0
"""A viewer who is no operator is asked for again after so many seconds."""
PAGE_S = 0.4
"""An overview of many jobs is asked for less often: by so many seconds for each 25 jobs."""


@dataclass(frozen=True)
class Overview:
    """The content of the first page.

    Attributes:
        live: leases that are not released.
        progress: how far jobs are that boot, by generation.
        newest: the newest leases, also ended ones, newest first.
        reports: what nodes told of live jobs, by generation.
        unread: live jobs whose reports have not been read yet.
        trouble: what operators see; None for other viewers, or if vhpcd does not answer this request.
        clusters: of jobs, oldest first.
        resting: keys of ended jobs that no job may get yet; empty if vhpcd's database cannot be read here.
    """

    live: tuple[LeaseRecord, ...]
    progress: Mapping[str, ProgressWire]
    newest: tuple[LeaseRecord, ...]
    reports: Mapping[str, tuple[NodeReport, ...]]
    unread: int = 0
    trouble: Trouble | None = None
    resting: tuple[KeyAssignment, ...] = ()
    clusters: tuple[Cluster, ...] = ()

    @property
    def fresh_s(self) -> float:
        """After how many seconds it may be asked for again."""
        return 2.0 + PAGE_S * (len(self.live) // 25)


class Viewing:
    """Asks for one viewer; remembers the reports of nodes, which do not change while a job runs."""

    def __init__(self, config: Config, as_uid: int | None) -> None:
        """``as_uid`` None: the user who runs this program."""
        limited = msgspec.structs.replace(
            config.controller, request_timeout_s=min(ANSWER_S, config.controller.request_timeout_s)
        )
        self._config = msgspec.structs.replace(config, controller=limited)
        self._operator = as_uid is None and _is_operator(config)
        self._as_uid = as_uid
        self._refused_until = 0.0
        self._reports: dict[str, tuple[NodeReport, ...]] = {}

    def overview(self) -> Overview:
        """The first page; VhpcError when vhpcd does not answer."""
        client = ControllerClient(self._config, as_uid=self._as_uid)
        live, progress = client.booting(live=True)
        newest = client.newest()
        wanted = [
            record
            for record in live
            if record.lease.state is LeaseState.READY and str(record.lease.generation) not in progress
        ][:REPORTED_JOBS]
        names = {str(record.lease.generation) for record in wanted}
        kept = {name: reports for name, reports in self._reports.items() if name in names}
        unread = [record for record in wanted if str(record.lease.generation) not in kept]
        for record in unread[:REPORTS_EACH]:
            name = str(record.lease.generation)
            reports = client.reports(record.lease.generation.job_id)
            kept[name] = tuple(one for one in reports if str(one.generation) == name)
        self._reports = kept
        return Overview(
            tuple(live),
            {one.generation: one for one in newest.progress} | progress,
            tuple(record.unpack() for record in newest.records),
            kept,
            max(0, len(unread) - REPORTS_EACH),
            self._trouble(client),
            self._resting() if self._operator else (),
            client.clusters(),
        )

    def _trouble(self, client: ControllerClient) -> Trouble | None:
        """Values for operators; vhpcd decides who is one, and after a refusal it is seldom asked again."""
        if time.monotonic() < self._refused_until:
            return None
        try:
            return client.trouble()
        except UserError:
            self._refused_until = time.monotonic() + REFUSED_S
        except VhpcError:
            pass  # the page shows the answers to the other requests
        return None

    def job(self, job_id: int) -> tuple[JobReport | None]:
        """The report of a job; (None,) if vhpcd shows this viewer no such job."""
        return (report.gather(ControllerClient(self._config, as_uid=self._as_uid), job_id),)

    def cluster(self, serial: int) -> tuple[tuple[Cluster, tuple[ClusterJob, ...]] | None]:
        """A cluster and its members; (None,) if vhpcd shows this viewer no such cluster."""
        client = ControllerClient(self._config, as_uid=self._as_uid)
        found = next((one for one in client.clusters() if one.serial == serial), None)
        return (None if found is None else (found, client.cluster_jobs(serial)),)

    def _resting(self) -> tuple[KeyAssignment, ...]:
        try:
            found = read_keys(self._config).assignments
        except (VhpcError, OSError):
            return ()  # the database is on another host, or this user may not read it
        return tuple(one for one in found if one.state in (KeyState.QUARANTINE, KeyState.TOMBSTONE))


def _is_operator(config: Config) -> bool:
    """Whether vhpcd shows its status to this process's user: root or SlurmUser."""
    try:
        return os.geteuid() in (0, pwd.getpwnam(config.controller.slurm_user).pw_uid)
    except KeyError:
        return os.geteuid() == 0
