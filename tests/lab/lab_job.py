# SPDX-License-Identifier: Apache-2.0
"""A job on the lab that Slurm knows nothing of."""

from __future__ import annotations

from functools import partial

from cluster import IMAGE, Lab

from by_hand import ByHand


class LabJob(ByHand):
    """A job by hand on n1."""

    def __init__(self, lab: Lab, guests: int = 1, network: str = "", disk_mib: int = 0) -> None:
        self.lab = lab
        words = ["--guests", str(guests)]
        if network:
            words += ["--network", network]
        if disk_mib:
            words += ["--disk", str(disk_mib)]
        super().__init__(partial(lab.run, "n1"), partial(lab.run, "ctl"), "n1", IMAGE, *words)

    def clean(self) -> None:
        assert self.lab.leaks() == [], self.generation
        assert self.lab.vhpc("n1", "reconcile", "--check") == []
