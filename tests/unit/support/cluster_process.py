# SPDX-License-Identifier: Apache-2.0
"""Jobs in clusters of a vhpcd process."""

from __future__ import annotations

import pwd
from ipaddress import IPv4Address

from controller_lab import request
from vhpcd_process import Vhpcd

from vhpc_slurm.model import Allocation, Lease, NodeAllocation

FIRST = IPv4Address("198.18.0.1")
"""Address of the first node; RFC 2544 has this network for tests."""


def allow_clusters(vhpcd: Vhpcd, *nodes: str) -> None:
    """Before its start: jobs may have networks, on nodes whose addresses Slurm knows."""
    with (vhpcd.folder / "vhpc.toml").open("a") as file:
        file.write('\n[network]\nallowed = ["none", "job"]\n')
    (vhpcd.folder / "scontrol.out").write_text("SlurmctldHost[0] = here(127.0.0.1)\n")
    (vhpcd.folder / "sinfo.out").write_text(
        "".join(f"{node}|{FIRST + at}|{FIRST + at}\n" for at, node in enumerate(nodes))
    )


def member(vhpcd: Vhpcd, job_id: int, user: str, cluster: str, *nodes: str, joins: bool = True) -> Lease:
    """A job of a cluster that runs, or that boots."""
    owner = pwd.getpwnam(user)
    job = request(job_id, uid=owner.pw_uid, gid=owner.pw_gid, user=user, cluster=cluster, network="job")
    parts = tuple(NodeAllocation(node, (0, 1), 2048) for node in nodes)
    lease = vhpcd.client.open_generation(job, Allocation(parts))
    assert not lease.refusal, lease.refusal
    for node in nodes:
        vhpcd.client.lease(job_id, 0, node, 5.0)
        if joins:
            vhpcd.client.ready(lease.generation, node, "passed")
    return lease
