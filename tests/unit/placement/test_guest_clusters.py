# SPDX-License-Identifier: Apache-2.0
"""Clusters of cores on Arm: a guest sees those of its host, as far as QEMU can show them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from captured import Trees, read

from vhpc_slurm.model import GuestTopology, HostInventory
from vhpc_slurm.placement.cpu import place_cpus

# lstopo on this capture of hwloc's tests: 2 packages, in each 2 NUMA cells of 8 clusters of 4 cores
ARM = "128arm-2pa2n8cluster4co"


def topology(host: HostInventory, abstract: list[int], arch: str = "aarch64") -> GuestTopology:
    host = replace(host, arch=arch)  # a capture does not have it
    by_number = {cpu.os_cpu: cpu for cpu in host.cpus}
    return place_cpus([by_number[host.abstract[number]] for number in abstract], host).topology


CASES = {
    "the whole node": (range(128), GuestTopology(2, 16, 4, 1)),
    "one cell": (range(32), GuestTopology(1, 8, 4, 1)),
    "a cluster of each socket": ((*range(4), *range(64, 68)), GuestTopology(2, 1, 4, 1)),
    "half of two clusters": ((0, 1, 4, 5), GuestTopology(1, 2, 2, 1)),
    "half of one cluster": ((2, 3), GuestTopology(1, 1, 2, 1)),
    # QEMU's clusters have the same number of cores: these are shown as one
    "a cluster and a core": (range(5), GuestTopology(1, 1, 5, 1)),
}


@pytest.mark.parametrize("case", CASES)
def test_a_guest_sees_the_clusters_of_its_cores(trees: Trees, case: str) -> None:
    abstract, shape = CASES[case]
    assert topology(read(trees(ARM)), list(abstract)) == shape


def test_cores_without_a_cluster_are_one_in_each_socket(trees: Trees) -> None:
    host = read(trees(ARM))
    without = replace(host, cpus=tuple(replace(cpu, cluster=-1) for cpu in host.cpus))
    assert topology(without, list(range(128))) == GuestTopology(2, 1, 64, 1)


def test_an_x86_guest_has_no_clusters(trees: Trees) -> None:
    """This Intel machine has clusters: QEMU's machines for x86-64 have none."""
    host = read(trees("20em64t-hybrid-1p6c2t+2ca4co1t"))
    assert {cpu.cluster for cpu in host.cpus} > {-1}
    assert topology(host, list(range(12, 20)), "x86_64") == GuestTopology(1, 1, 8, 1)
