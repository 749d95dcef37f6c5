# SPDX-License-Identifier: Apache-2.0
"""Plans on a host with GPUs and virtual functions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from machine_tree import gpu_node
from placement_rig import REQUEST, case_of

from vhpc_slurm.config import Config, Guests, Host
from vhpc_slurm.device import NodeDevices
from vhpc_slurm.model import GresAllocation, HostInventory, NodeAllocation, NodePlan
from vhpc_slurm.node.host import inventory
from vhpc_slurm.placement.plan import Refusal, fit
from vhpc_slurm.placement.usage import NOTHING, Usage

CONFIG = Config()


@pytest.fixture(scope="module", name="host")
def gpu_host(tmp_path_factory: pytest.TempPathFactory) -> HostInventory:
    """Two sockets of 8 cores, on each two root complexes with a switch of two GPUs and an HCA of four VFs."""
    tree = gpu_node(tmp_path_factory.mktemp("tree"))
    config = Config(host=Host(sysfs_root=str(tree.sys)), guests=Guests(accelerator="tcg"))
    found = inventory.read_inventory("n1", config, proc_root=tree.root / "proc", kvm_device=Path("/nowhere"))
    return replace(found, kvm=True, arch="x86_64")


def devices(host: HostInventory, **changes: Any) -> NodeDevices:
    gpus = tuple(f.address for f in host.pci if f.class_code >> 8 == 0x0302)
    return NodeDevices(**({"gpus": gpus} | changes))


def gres(gpus: tuple[int, ...] = (), vfs: int = 0) -> tuple[GresAllocation, ...]:
    return (
        *([GresAllocation("gpu", "h100", len(gpus), gpus)] if gpus else []),
        *([GresAllocation("ibvf", "", vfs)] if vfs else []),
    )


def attempt(
    host: HostInventory,
    cpu_ids: range,
    wanted: tuple[GresAllocation, ...],
    *,
    memory_mib: int = 65536,
    config: Config = CONFIG,
    usage: Usage = NOTHING,
    given: NodeDevices | None = None,
    **request: Any,
) -> NodePlan | Refusal:
    allocation = NodeAllocation("n1", tuple(cpu_ids), memory_mib, wanted)
    case = case_of(allocation, host, replace(REQUEST, **request), usage=usage, devices=given or devices(host))
    return fit(case, config)


def planned(host: HostInventory, cpu_ids: range, wanted: tuple[GresAllocation, ...], **how: Any) -> NodePlan:
    result = attempt(host, cpu_ids, wanted, **how)
    assert isinstance(result, NodePlan), result.error().line()
    return result


SOCKET_0, SOCKET_1, ALL = range(16), range(16, 32), range(32)
# gpu_node's addresses: root complexes at buses 08, 44 (socket 0) and 80, bc (socket 1); behind a switch
# at the next bus two GPUs at +3 and +4, the HCA at +5
GPUS = [f"0000:{bus:02x}:00.0" for base in (0x08, 0x44, 0x80, 0xBC) for bus in (base + 3, base + 4)]
