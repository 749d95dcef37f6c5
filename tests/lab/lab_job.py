# SPDX-License-Identifier: Apache-2.0
"""A job on the lab whose hooks Slurm does not call."""

from __future__ import annotations

from functools import partial

from cluster import IMAGE, Job, Lab

from by_hand import KILLED, ByHand


class LabJob(ByHand):
    """A job by hand on n1.

    With ``known`` Slurm runs a job of the same id there, one without guests: otherwise vhpcd, which asks
    Slurm once a minute, ends the lease, perhaps while the guest boots.
    """

    def __init__(
        self, lab: Lab, guests: int = 1, network: str = "", disk_mib: int = 0, known: bool = False
    ) -> None:
        self.lab = lab
        self.slurms: Job | None = None
        if known:
            self.slurms = lab.submit("sleep 600", "-w", "n1", "-n1", "-t10", "--mem=64", image=None)
            self.slurms.wait("RUNNING")
        words = ["--guests", str(guests)]
        if network:
            words += ["--network", network]
        if disk_mib:
            words += ["--disk", str(disk_mib)]
        super().__init__(
            partial(lab.run, "n1"),
            partial(lab.run, "ctl"),
            "n1",
            IMAGE,
            *words,
            job_id=None if self.slurms is None else self.slurms.id,
        )

    def end(self) -> None:
        """End the lease, and Slurm's job if there is one."""
        self.drive("end")
        if self.slurms is not None:
            self.lab.run("login", "scancel", str(self.id), user=self.slurms.user)
            self.slurms.leave_queue()
            self.slurms = None

    def interrupt_epilog(self, kind: str) -> None:
        """Call the Epilog, which is killed when it has released a resource of that kind and not noted it."""
        assert self.drive("epilog", kind, check=False).code == KILLED, (
            f"nothing of the kind {kind} was released"
        )
        found = self.lab.vhpc("n1", "reconcile", "--check", check=False)
        assert "stale-generation" in [one["kind"] for one in found], f"killed at the kind {kind}: {found}"

    def clean(self) -> None:
        left = self.lab.leaks()
        assert left == [], f"{self.generation} left {left}"
        assert self.lab.vhpc("n1", "reconcile", "--check") == []
