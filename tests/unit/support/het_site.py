# SPDX-License-Identifier: Apache-2.0
"""Requests and leases of the components of a heterogeneous job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from controller_lab import allocation, identity, request
from segment_site import Site

from vhpc_slurm.controller.leases.opening import Wanted
from vhpc_slurm.model import HetPlace, JobRequest, Lease

UNDERLAY = {f"n{number}": f"192.0.2.{number}" for number in range(1, 9)}


def component(offset: int, components: int, restart: int = 0, **asked: Any) -> JobRequest:
    return request(10 + offset, restart, het=HetPlace(10, offset, components), **asked)


def open_all(site: Site, *parts: Wanted, addresses: Mapping[str, str] = UNDERLAY) -> tuple[Lease, ...]:
    """The leases of components, as the last of their requests makes them."""
    return tuple(record.lease for record in site.service.leases.opening.reserve_all(parts, addresses))


def two(restart: int = 0) -> tuple[Wanted, Wanted]:
    """A component of one node, and one of two nodes with two guests each."""
    return (
        Wanted(component(0, 2, restart), allocation("n3", memory_mib=1024), identity(0)),
        Wanted(component(1, 2, restart, guests_per_node=2), allocation("n1", "n2"), identity(0)),
    )
