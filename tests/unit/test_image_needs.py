# SPDX-License-Identifier: Apache-2.0
"""What an image needs is compared with the allocation before a lease is made."""

from __future__ import annotations

from dataclasses import replace

import pytest
from controller_lab import allocation, identity, request

from vhpc_slurm.config import Config
from vhpc_slurm.controller.leases import rules


@pytest.mark.parametrize(
    ("guests", "min_cpus", "says"),
    [
        (1, 4, ""),
        (2, 2, ""),
        (1, 5, "needs 5 CPUs: the job has 4 on n1 (ask for 5 or more, such as --cpus-per-task=5)"),
        (
            2,
            3,
            "needs 3 CPUs for each of 2 guests: the job has 4 on n1 "
            "(ask for 6 or more, such as --cpus-per-task=6)",
        ),
    ],
)
def test_fewer_cpus_than_the_image_needs_refuse_the_lease(guests: int, min_cpus: int, says: str) -> None:
    """The job has 4 CPUs on each node."""
    image = identity()
    image = replace(image, manifest=replace(image.manifest, min_cpus=min_cpus))
    line = rules.misfit(request(guests_per_node=guests), allocation(cpu_ids=(0, 1, 2, 3)), image, Config())
    assert line == (f"image debian-minimal:latest {says}" if says else "")
