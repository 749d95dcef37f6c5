# SPDX-License-Identifier: Apache-2.0
"""Jobs with the longest names that a site has, for the layout of pages; images are given by digest."""

from __future__ import annotations

import pwd
import time
from typing import Any

from cluster_process import member
from controller_lab import allocation, manifest, publish, request
from vhpcd_process import Vhpcd
from web_site import GPU_AT, VF_AT, end, host, timeline

from vhpc_slurm.controller.api.status_messages import DeviceWire
from vhpc_slurm.model import (
    Figures,
    GuestPlacement,
    GuestUsage,
    ImageRef,
    Lease,
    NodeReport,
    NodeUsage,
    SharedIo,
    StepUsage,
)

IMAGE, TAG = "debian-bookworm-openmpi-5.0-cuda-12.6-nightly", "2026.11.26-rebuild_4"
USER = "bioinformatics-service"
NODES = tuple(f"gpu-rack12-node{number:03}" for number in (1, 2, 5, 17))
RUNS, BOOTS, REFUSED, STUCK, UNBROKEN = 4194301, 4194302, 4194303, 4194304, 4194305
MEMBERS, CLUSTER = 4194310, "parsl-workers_of-the-hyperparameter-search-2026-11-26-seed-0001"
NAME = "train_resnet152_imagenet21k.seed-0001_lr-0.00025_batch-4096"
STAYS = "VF 0000:5e:00.2 does not come back from vfio-pci: Device or resource busy; see dmesg of this node"


def fill(vhpcd: Vhpcd) -> None:
    """Jobs that run, boot, were refused and cannot be released."""
    digest = publish(vhpcd.folder / "catalog", manifest(IMAGE, TAG))
    pinned = ImageRef(IMAGE, TAG, digest)
    end(vhpcd, _runs(vhpcd, STUCK, "md_equilibrate-chain_A.restart-12", pinned, NODES[2:3]), NODES[2], STAYS)
    _runs(vhpcd, UNBROKEN, "x" * 150, pinned, NODES[3:])
    _open(
        vhpcd,
        REFUSED,
        "typo-in-the-digest",
        ImageRef(IMAGE, TAG, "sha256:" + "0123456789abcdef" * 4),
        NODES[:1],
    )
    _open(vhpcd, BOOTS, "boots-for-a-while", pinned, NODES[:2])
    vhpcd.client.lease(BOOTS, 0, NODES[0], 5.0)
    vhpcd.client.look(BOOTS, 0, NODES[0], ("setup g0", 12.0))
    lease = _runs(vhpcd, RUNS, NAME, pinned, NODES)
    figures = Figures(3_600_000_000, 3_500_000_000, 100_000_000, 61 << 30, 20 << 30, 1 << 40, 1 << 39, 2)
    steps = (StepUsage("batch", figures, 1), StepUsage("extern", figures, 64))
    for node in NODES:
        guests = (GuestUsage(0, figures, steps, 1 << 26, shared=SharedIo(3 << 40, 5 << 30)),)
        vhpcd.client.report_usage_so_far(node, [NodeUsage(lease.generation, node, guests)])
    stuck = DeviceWire(address="0000:af:00.0", role="gpu", reason=STAYS, since=time.time() - 7200)
    vhpcd.client.report_quarantine("gpu-rack12-node042", [stuck])


def fill_clusters(vhpcd: Vhpcd) -> None:
    """Clusters with jobs that run and boot, and one that is kept."""
    for number, nodes in enumerate((NODES, NODES[:1], NODES[1:2])):
        member(vhpcd, MEMBERS + number, "games", CLUSTER, *nodes, joins=number < 2)
    vhpcd.client.keep_cluster("later", 86400.0)


def _open(vhpcd: Vhpcd, job_id: int, name: str, image: ImageRef, nodes: tuple[str, ...]) -> Lease:
    owner = pwd.getpwnam("games")
    who: dict[str, Any] = {
        "uid": owner.pw_uid,
        "gid": owner.pw_gid,
        "user": USER,
        "account": "computational-biology",
    }
    job = request(job_id, job_name=name, image=image, partition="gpu-h200-long", **who)
    return vhpcd.client.open_generation(
        job, allocation(*nodes, memory_mib=65536, cpu_ids=tuple(range(0, 32, 2)))
    )


def _runs(vhpcd: Vhpcd, job_id: int, name: str, image: ImageRef, nodes: tuple[str, ...]) -> Lease:
    lease = _open(vhpcd, job_id, name, image, nodes)
    for place, node in enumerate(nodes):
        vhpcd.client.lease(job_id, 0, node, 5.0)
        devices = ((GPU_AT, "gpu"), (VF_AT, "vf"), ("0000:5e:00.3", "vf"))
        guest = GuestPlacement(
            0, node, tuple(range(0, 32, 2)), ((0, 30720), (1, 30720)), 2048, devices=devices
        )
        said = f"warning: image {image} was replaced by a newer one; this job keeps the one of its digest"
        vhpcd.client.report_timeline(
            timeline(lease, node, 0.1 * place),
            NodeReport(lease.generation, node, host(node), (guest,), (said,)),
        )
    return lease
