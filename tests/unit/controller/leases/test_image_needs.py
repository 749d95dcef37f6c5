# SPDX-License-Identifier: Apache-2.0
"""An image's needs are compared with the allocation before a lease is made."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from controller_lab import allocation, identity, request

from vhpc_slurm.config import Config, load
from vhpc_slurm.config.images import Images
from vhpc_slurm.controller.leases import layer, rules
from vhpc_slurm.controller.store.database import SqliteStore
from vhpc_slurm.errors import NodeError
from vhpc_slurm.fabric.backend import NoNetwork
from vhpc_slurm.model import Allocation, GresAllocation, ImageIdentity, NodeAllocation
from vhpc_slurm.placement import drivers


@pytest.mark.promise("image.cpus")
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


GPU_DRIVERS = ("nvidia>=535", "h200:nvidia>=570.86", "mi300:amdgpu", "mi300:amdgpu-dkms>=6")


@pytest.mark.promise("image.driver")
@pytest.mark.parametrize(
    ("kind", "has", "says"),
    [
        ("h200", {"nvidia": "570.86.15"}, ""),
        ("h200", {"nvidia": "570.9"}, ""),  # 535 suffices for any GPU, and one of several is enough
        (
            "h200",
            {"nvidia": "470.256.02"},
            "needs nvidia >= 535 or nvidia >= 570.86 and has nvidia 470.256.02",
        ),
        ("h200", {"nvidia": ""}, "and has nvidia of unknown version"),
        ("h200", {"virtio_blk": "9999"}, "and has no such driver"),
        ("", {"nvidia": "535"}, ""),
        (
            "",
            {"nvidia": "534.99"},
            "drive the GPUs of this job: it needs nvidia >= 535 and has nvidia 534.99",
        ),
        ("mi300", {"amdgpu": ""}, ""),
        ("mi300", {"amdgpu-dkms": "5.18"}, "and has amdgpu-dkms 5.18"),
    ],
)
def test_an_image_without_a_driver_for_the_gpus_is_refused(kind: str, has: dict[str, str], says: str) -> None:
    image = with_drivers(has)
    job = Allocation((NodeAllocation("n1", (0, 1), 2048, (GresAllocation("gpu", kind, 2, (0, 1)),)),))
    line = drivers.missing(job, image, "gpu", GPU_DRIVERS)
    assert bool(line) == bool(says)
    assert says in line
    assert drivers.missing(job, image, "gpu", ()) == ""
    assert drivers.missing(job, image, "accelerator", GPU_DRIVERS) == "", "the site has another name for GPUs"


@pytest.mark.promise("devices.nvswitch-driver")
@pytest.mark.parametrize("has", ["580.95.05", "580.95", "580.95.050", "580.95.06", "590.48.01"])
def test_an_exact_version_of_a_driver_can_be_required(has: str) -> None:
    job = Allocation((NodeAllocation("n1", (0,), 2048, (GresAllocation("gpu", "b200", 1, (0,)),)),))
    line = drivers.missing(job, with_drivers({"nvidia": has}), "gpu", ("b200:nvidia==580.95.05",))
    assert (line == "") == (has == "580.95.05")
    assert line == "" or f"it needs nvidia == 580.95.05 and has nvidia {has}" in line


def with_drivers(has: dict[str, str]) -> ImageIdentity:
    image = identity()
    versions = tuple((name, version) for name, version in has.items() if version)
    return replace(image, manifest=replace(image.manifest, drivers=tuple(has), driver_versions=versions))


def test_a_job_without_gpus_needs_no_driver() -> None:
    job = Allocation((NodeAllocation("n1", (0,), 2048, (GresAllocation("gpu", "h200", 0),)),))
    assert drivers.missing(job, with_drivers({}), "gpu", GPU_DRIVERS) == ""


@pytest.mark.parametrize(
    "text", ["", "nvidia>=", ">=5", "a b", "nvidia>5", "x:y:z", "nvidia>=5.", "nvidia=5"]
)
def test_a_requirement_of_another_form_is_a_wrong_configuration(tmp_path: Path, text: str) -> None:
    file = tmp_path / "vhpc.toml"
    file.write_text(f'[images]\ngpu_drivers = ["nvidia", "{text}"]\n')
    with pytest.raises(NodeError, match=r"gpu_drivers"):
        load(file)


@pytest.mark.promise("image.driver")
def test_a_lease_is_refused_for_want_of_a_driver() -> None:
    config = Config(images=Images(gpu_drivers=("h200:nvidia>=570",)))

    def refusal(job_id: int, has: dict[str, str]) -> str:
        """The job has two GPUs of type h200 on each node."""
        opening = layer.build(SqliteStore(":memory:"), NoNetwork(), config).opening
        return opening.reserve(request(job_id), allocation(), with_drivers(has)).lease.refusal

    assert refusal(1, {"nvidia": "535.1"}).startswith(
        "image debian-minimal:latest cannot drive GPUs of type h200 of this job: it needs nvidia >= 570 and "
        "has nvidia 535.1 (choose another image"
    )
    assert refusal(2, {"nvidia": "570"}) == ""
