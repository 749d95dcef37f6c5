# SPDX-License-Identifier: Apache-2.0
"""Jobs with devices, prepared as Prolog prepares them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import pytest
from device_rig import GENERATION, Rig
from kill_rig import before, kills
from placement_rig import MANIFEST, REQUEST

from vhpc_slurm import files
from vhpc_slurm.model import (
    Allocation,
    GresAllocation,
    HostInventory,
    ImageIdentity,
    Lease,
    LeaseState,
    NetworkIdentity,
    NodeAllocation,
    NodePlan,
)
from vhpc_slurm.node.boot import reserve
from vhpc_slurm.node.boot.state import Boot
from vhpc_slurm.node.guest.libvirtd import Hypervisor
from vhpc_slurm.node.host import accounts, attribute, inventory
from vhpc_slurm.node.resource import registry
from vhpc_slurm.node.store.journal import Journal
from vhpc_slurm.node.store.timeline import Recorder

IB = NetworkIdentity("ib", 0x1234, first_rank=3, rails=1, vfs=2)


def lease(*gres: GresAllocation, net: NetworkIdentity = IB, nodes: tuple[str, ...] = ("n0", "n1")) -> Lease:
    image = ImageIdentity(REQUEST.image, "sha256:" + "0" * 64, MANIFEST)
    parts = tuple(NodeAllocation(node, (0, 1), 4096, gres) for node in nodes)
    return Lease(GENERATION, LeaseState.READY, REQUEST, Allocation(parts), image, net)


def another(what: Lease, number: int) -> Lease:
    """The lease of a later job, which has the next two CPUs of each node."""
    parts = tuple(replace(part, cpu_ids=(2 * number, 2 * number + 1)) for part in what.allocation.nodes)
    generation = replace(GENERATION, job_id=GENERATION.job_id + number)
    return replace(what, generation=generation, allocation=replace(what.allocation, nodes=parts))


def gpus(*indexes: int) -> GresAllocation:
    return GresAllocation("gpu", "h200", len(indexes), indexes)


def vfs(count: int) -> GresAllocation:
    return GresAllocation("ibvf", "", count)


def host(rig: Rig) -> HostInventory:
    return inventory.read_inventory("n1", rig.layout.config, proc_root=rig.root / "written/proc")


def prepare(rig: Rig, what: Lease) -> tuple[NodePlan, Journal]:
    """Prolog's work until the first guest starts."""
    journal = Journal(rig.layout.journals, what.generation)
    recorder = Recorder(rig.layout.timeline(what.generation), what.generation, "n1")
    node = host(rig)
    plan = reserve.reserve(rig.layout, what, node, (), journal)
    assert what.image is not None
    work = Boot(
        rig.layout, what, what.image, plan, node, journal, recorder,
        cast(accounts.Account, None), cast(Hypervisor, None),
    )  # fmt: skip
    return reserve.take_devices(work), journal


def kills_of(rig: Rig, what: Lease, patch: pytest.MonkeyPatch) -> Iterator[int]:
    """Steps at which a job was killed that takes and releases its devices; each file write is a step."""
    patch.setattr(files, "write", before(files.write))
    patch.setattr(attribute, "write_attribute", before(attribute.write_attribute))

    def whole_job() -> None:
        _, journal = prepare(rig, what)
        assert registry.release_all(rig.layout, journal) == []

    yield from kills(whole_job)
