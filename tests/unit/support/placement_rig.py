# SPDX-License-Identifier: Apache-2.0
"""A host of two sockets, a job and an image, to make plans of."""

from __future__ import annotations

from vhpc_slurm.config import Config
from vhpc_slurm.device import NodeDevices
from vhpc_slurm.model import (
    Blob,
    Generation,
    HostCell,
    HostCpu,
    HostInventory,
    ImageIdentity,
    ImageManifest,
    ImageRef,
    JobRequest,
    NodeAllocation,
    NodePlan,
)
from vhpc_slurm.placement.input import PlanInput
from vhpc_slurm.placement.plan import Refusal, fit
from vhpc_slurm.placement.usage import NOTHING, Usage

GENERATION = Generation(42, 0, "9f3ac1d2")
REQUEST = JobRequest(42, 0, 2001, 2001, "alice", "/home/alice", ImageRef("debian-minimal"))
BLOB = Blob("x", "0" * 64, 1)
MANIFEST = ImageManifest(
    schema=1,
    name="debian-minimal",
    tag="latest",
    arch="x86_64",
    kernel=BLOB,
    initrd=BLOB,
    root=BLOB,
    root_format="erofs",
    init="agent",
    cmdline="",
    min_memory_mib=384,
    firmware="",
    drivers=(),
    agent_version="1",
)


def case_of(
    allocation: NodeAllocation,
    machine: HostInventory,
    request: JobRequest = REQUEST,
    manifest: ImageManifest = MANIFEST,
    *,
    generation: Generation = GENERATION,
    usage: Usage = NOTHING,
    devices: NodeDevices | None = None,
) -> PlanInput:
    """The inputs of a plan for a job of this image."""
    image = ImageIdentity(request.image, "sha256:" + "0" * 64, manifest)
    return PlanInput(generation, allocation, machine, request, image, usage=usage, devices=devices)


def fitted(case: PlanInput, config: Config) -> NodePlan:
    """The placement, or its refusal raised, as Prolog does it."""
    found = fit(case, config)
    if isinstance(found, Refusal):
        raise found.error()
    return found


def host(
    sockets: int = 1,
    cores: int = 4,
    threads: int = 2,
    *,
    cells_per_socket: int = 1,
    cell_mib: int = 16384,
    offline_cores: frozenset[int] = frozenset(),
    offline_cpus: frozenset[int] = frozenset(),
) -> HostInventory:
    """A host whose SMT siblings lie far apart, as x86 firmware numbers them."""
    per_cell = cores // cells_per_socket
    total = sockets * cores
    cpus: list[HostCpu] = []
    abstract: list[int] = []
    cells: dict[int, list[int]] = {}
    for core in range(total):
        cell = core // per_cell
        for thread in range(threads):
            number = core + thread * total
            online = core not in offline_cores and number not in offline_cpus
            place = (core, core // cores, cell) if online else (-1, -1, -1)
            cpus.append(HostCpu(number, *place, online=online))
            if online:
                abstract.append(number)
                cells.setdefault(cell, []).append(number)
    return HostInventory(
        node="n1",
        cpu_vendor="GenuineIntel",
        cpus=tuple(sorted(cpus)),
        cells=tuple(
            HostCell(cell, cell_mib, tuple(sorted(members)), ((cell, 10),)) for cell, members in cells.items()
        ),
        abstract=tuple(abstract),
        kvm=True,
        kvm_reason="",
    )
