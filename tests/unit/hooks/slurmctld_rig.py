# SPDX-License-Identifier: Apache-2.0
"""Slurm and vhpcd as PrologSlurmctld and EpilogSlurmctld reach them."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from controller_lab import manifest

from vhpc_slurm.controller.client import ControllerClient
from vhpc_slurm.errors import VhpcError
from vhpc_slurm.hooks import slurmctld
from vhpc_slurm.model import (
    Allocation,
    Generation,
    ImageIdentity,
    JobRequest,
    Lease,
    LeaseState,
    NodeAllocation,
)
from vhpc_slurm.slurm.port import JobRef, SlurmError, SlurmJob

DIGEST = "sha256:" + "c" * 64
PARTS = Allocation((NodeAllocation("n1", (0, 1), 1024),))
JOB = SlurmJob(
    job_id=42,
    restarts=1,
    state="CONFIGURING",
    reason="None",
    uid=2001,
    gid=2001,
    user="alice",
    partition="main",
    name="sim",
    work_dir="/home/alice",
    features="",
    allocation=PARTS,
)


@dataclass
class Controller:
    """Slurm and vhpcd as the hooks reach them; notes what they are asked."""

    job: SlurmJob | VhpcError = JOB
    answer: VhpcError | None = None
    refusal: str = ""
    commentable: bool = True
    commented: str = ""
    comment: str = ""
    opened: list[JobRequest] = field(default_factory=list)
    comments: list[str] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    ended: list[tuple[int, int]] = field(default_factory=list)

    def load_with_comment(self, job_id: int) -> tuple[SlurmJob, str]:
        assert job_id == 42
        if isinstance(self.job, VhpcError):
            raise self.job
        return self.job, self.comment

    def set_admin_comment(self, job: JobRef, text: str) -> None:
        assert job.job_id == 42
        self.commented = job.alone
        if not self.commentable:
            raise SlurmError("scontrol update failed", "Access/permission denied")
        self.comments.append(text)

    def cancel(self, job_id: int) -> None:
        self.cancelled.append(job_id)

    def open_generation(self, request: JobRequest, allocation: Allocation, waiter: str = "") -> Lease:
        assert allocation == PARTS
        if self.answer is not None:
            raise self.answer
        self.opened.append(request)
        generation = Generation(42, 1, "0123abcd")
        if self.refusal:
            return Lease(generation, LeaseState.REFUSED, request, allocation, None, refusal=self.refusal)
        image = ImageIdentity(request.image, DIGEST, manifest())
        return Lease(generation, LeaseState.READY, request, allocation, image)

    def ending(self, job_id: int, restart: int) -> None:
        if self.answer is not None:
            raise self.answer
        self.ended.append((job_id, restart))


def controller_of_job(monkeypatch: pytest.MonkeyPatch) -> Controller:
    """The environment of the hook of job 42, and its Slurm and vhpcd."""
    found = Controller()
    environment = {
        "SLURM_JOB_ID": "42",
        "SLURM_JOB_RESTART_COUNT": "1",
        "SLURM_JOB_UID": "2001",
        "SLURM_JOB_WORK_DIR": "/scratch/alice",
        "SPANK_VHPC_IMAGE": "debian-minimal:1",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(slurmctld, "commands", lambda _: found)
    monkeypatch.setattr(ControllerClient, "open_generation", lambda _, *asked: found.open_generation(*asked))
    monkeypatch.setattr(ControllerClient, "ending", lambda _, *asked: found.ending(*asked))
    return found
