# SPDX-License-Identifier: Apache-2.0
"""Guests whose domains are compared with golden files and shown to QEMU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from placement_rig import MANIFEST

from vhpc_slurm.device import PassthroughDevice
from vhpc_slurm.domain.spec import DomainSpec
from vhpc_slurm.hardware import PciController
from vhpc_slurm.model import (
    Generation,
    GuestCell,
    GuestInterface,
    GuestPaths,
    GuestPlan,
    GuestTopology,
    HostInventory,
    MemoryBinding,
    NatInterface,
    RunningGuest,
    Share,
    VcpuPin,
)

GENERATION = Generation(42, 0, "9f3ac1d2")
RUN = "/run/vhpc/jobs/42/g0"
PATHS = GuestPaths(
    RUN,
    f"{RUN}/kernel",
    f"{RUN}/initrd",
    "/var/lib/vhpc/images/blobs/sha256/" + "ab" * 32,
    f"{RUN}/agent.sock",
    f"{RUN}/console.log",
)
HOST = HostInventory("n1", "GenuineIntel", (), (), (), kvm=True, kvm_reason="")


def guest(os_cpus: list[int], topology: GuestTopology, **changes: Any) -> GuestPlan:
    vcpus = tuple(range(len(os_cpus)))
    plan = GuestPlan(
        index=0,
        hostname="n1",
        pins=tuple(VcpuPin(vcpu, cpu, 0) for vcpu, cpu in enumerate(os_cpus)),
        topology=topology,
        cells=(GuestCell(0, vcpus, 3840, 0, nodeset=(0,)),),
        memory_mib=3840,
        emulator_cpus=tuple(sorted(os_cpus)),
        emulator_choice="",
        paths=PATHS,
    )
    return replace(plan, **changes)


def spec(plan: GuestPlan, **changes: Any) -> DomainSpec:
    """The domain of a guest; changes as in ``changed``."""
    running = RunningGuest(plan, 700042, (Share("home", "/home/alice", read_only=False, why="home"),))
    manifest = replace(MANIFEST, cmdline="net.ifnames=0")
    base = DomainSpec("vhpc-42-0-9f3ac1d2-g0", GENERATION, running, HOST, manifest, 104, 9_000_000)
    return changed(base, **changes)


def on_arm(plan: GuestPlan, **changes: Any) -> DomainSpec:
    """The domain of a guest on a node like NVIDIA's Grace: Neoverse V2 without SMT."""
    made = spec(plan, **({"cpu_vendor": "0x41", "libvirt_version": 9_001_000} | changes))
    host, manifest = replace(made.host, arch="aarch64"), replace(made.manifest, arch="aarch64")
    return replace(made, host=host, manifest=manifest)


def changed(base: DomainSpec, **changes: Any) -> DomainSpec:
    """A domain with other values of its fields, else of the guest, of the files of the guest, and so on."""

    def of(part: Any, **more: Any) -> Any:
        names = [name for name in changes if name in part.__struct_fields__]
        return replace(part, **{name: changes.pop(name) for name in names}, **more)

    base = of(base)
    running, paths = of(base.running), of(base.guest.paths)
    running = replace(running, plan=of(running.plan, paths=paths))
    made: DomainSpec = replace(base, running=running, host=of(base.host), manifest=of(base.manifest))
    assert not changes
    return made


FLAT = guest([2, 3], GuestTopology(1, 1, 2, 1))
SMT2 = guest(
    [1, 65, 2, 66], GuestTopology(1, 1, 2, 2), memory_binding=MemoryBinding.PREFERRED, emulator_cpus=(0, 64)
)
TWO_CELLS = guest(
    [0, 1, 8, 9],
    GuestTopology(2, 1, 2, 1),
    cells=(
        GuestCell(0, (0, 1), 2048, 0, ((0, 10), (1, 21)), (0,)),
        GuestCell(1, (2, 3), 2048, 1, ((0, 21), (1, 10)), (1,)),
    ),
    memory_mib=4096,
    hugepage_kib=2048,
    memory_binding=MemoryBinding.STRICT,
)
PREFERRED_CELLS = replace(TWO_CELLS, memory_binding=MemoryBinding.PREFERRED, hugepage_kib=0)
# A GPU and a VF below one host switch at the first cell, a GPU alone at the second.
DEVICES = replace(
    TWO_CELLS,
    hugepage_kib=1048576,
    devices=(
        PassthroughDevice("0000:0b:00.0", "gpu", 0, "pci0000:08", 4),
        PassthroughDevice("0000:0d:00.1", "vf", 0, "pci0000:08", 5),
        PassthroughDevice("0000:83:00.0", "gpu", 1, "pci0000:80", 7),
    ),
    controllers=(
        PciController(1, "pcie-expander-bus", bus_nr=249, cell=0),
        PciController(2, "pcie-root-port", 1, 0),
        PciController(3, "pcie-switch-upstream-port", 2, 0),
        PciController(4, "pcie-switch-downstream-port", 3, 0),
        PciController(5, "pcie-switch-downstream-port", 3, 1),
        PciController(6, "pcie-expander-bus", bus_nr=254, cell=1),
        PciController(7, "pcie-root-port", 6, 0),
    ),
    pcihole64_gib=512,
    address_bits=40,
)
# Two mdevs of one GPU and a vGPU: parts of GPUs, which stay with their drivers.
GPU_PARTS = replace(
    FLAT,
    devices=(
        PassthroughDevice(
            "76687063-0000-8000-8000-000000000b00", "mdev", 0, "pci0000:08", 2, parent="0000:0b:00.0"
        ),
        PassthroughDevice(
            "76687063-0000-8001-8000-000000000b00", "mdev", 0, "pci0000:08", 3, parent="0000:0b:00.0"
        ),
        PassthroughDevice("0000:0d:00.4", "vgpu", 0, "pci0000:08", 4),
    ),
    controllers=(
        PciController(1, "pcie-expander-bus", bus_nr=252, cell=0),
        PciController(2, "pcie-root-port", 1, 0),
        PciController(3, "pcie-root-port", 1, 1),
        PciController(4, "pcie-root-port", 1, 2),
    ),
    pcihole64_gib=64,
    address_bits=39,
)


def large(topology: GuestTopology, **changes: Any) -> GuestPlan:
    """A guest with all threads of a host, a NUMA cell for each socket."""
    count = topology.sockets * topology.clusters * topology.cores * topology.threads
    share = count // topology.sockets
    cells = tuple(
        GuestCell(
            cell,
            tuple(range(cell * share, (cell + 1) * share)),
            8192,
            cell,
            tuple((other, 10 if other == cell else 21) for other in range(topology.sockets)),
            (cell,),
        )
        for cell in range(topology.sockets)
    )
    plan = guest(
        list(range(count)),
        topology,
        cells=cells,
        memory_mib=8192 * len(cells),
        memory_binding=MemoryBinding.STRICT,
        emulator_cpus=(0,),
    )
    return replace(plan, **changes)


UEFI = "/usr/share/AAVMF/AAVMF_CODE.no-secboot.fd"
NIC = GuestInterface("vhpc5000g0", "06:00:13:88:00:01", 2, "10.200.0.2/16", "fd76:6870:6300::2/64")
NAT = NatInterface("02:76:68:70:63:02", "10.201.0.2/24", "10.201.0.1", 65520)
SHARES = tuple(Share(tag, f"/{tag}", read_only=False, why="site") for tag in ("home", "work", "scratch"))
SNAPSHOT = Share("site0", "/sw", read_only=True, why="site", snapshot="/shared/catalog/snapshots/sw-1.erofs")
CASES = {
    "kvm-intel": spec(FLAT),
    "kvm-saveable": replace(spec(FLAT), saveable=True),
    "kvm-amd-smt2": spec(SMT2, cpu_vendor="AuthenticAMD"),
    "tcg": spec(FLAT, kvm=False, cpu_vendor="AuthenticAMD", emulator="/usr/bin/qemu-system-x86_64"),
    "hugepages-two-cells": spec(TWO_CELLS),
    "preferred-two-cells": spec(PREFERRED_CELLS),
    "devices": spec(DEVICES),
    "gpu-parts": spec(GPU_PARTS),
    "shares": spec(FLAT, kvm=False, shares=SHARES),
    "network": spec(replace(FLAT, interface=NIC), mtu=1450),
    "nat": spec(replace(FLAT, interface=NIC, nat=NAT), mtu=1450),
    "snapshots": spec(
        FLAT, disk="/var/lib/vhpc/disks/vhpc-42-0-9f3ac1d2-g0.disk", shares=(SNAPSHOT, *SHARES)
    ),
    "network-one-queue": spec(replace(FLAT, interface=replace(NIC, queues=1)), shares=SHARES),
    "disk": spec(FLAT, disk="/var/lib/vhpc/disks/vhpc-42-0-9f3ac1d2-g0.disk"),
    "no-shares": spec(FLAT, kvm=False, shares=()),
    "255-vcpus": spec(large(GuestTopology(1, 1, 255, 1))),
    "256-vcpus": spec(large(GuestTopology(2, 1, 64, 2)), cpu_vendor="AuthenticAMD"),
    "256-vcpus-devices": spec(
        large(
            GuestTopology(2, 1, 128, 1),
            devices=DEVICES.devices,
            controllers=DEVICES.controllers,
            pcihole64_gib=512,
            address_bits=40,
        )
    ),
    "288-vcpus-tcg": spec(large(GuestTopology(2, 1, 72, 2)), kvm=False, libvirt_version=11_003_000),
    "512-vcpus": spec(
        large(GuestTopology(2, 1, 128, 2)), cpu_vendor="AuthenticAMD", libvirt_version=11_003_000
    ),
    "1024-vcpus": spec(large(GuestTopology(8, 1, 64, 2)), libvirt_version=11_003_000),
    # 240 vCPUs, and APIC IDs up to 335: a third socket's begin at 256
    "three-sockets": spec(large(GuestTopology(3, 1, 40, 2))),
    "aarch64-kvm": on_arm(FLAT, shares=SHARES),
    "aarch64-saveable": replace(on_arm(FLAT), saveable=True),
    "aarch64-tcg": on_arm(FLAT, kvm=False, emulator="/usr/bin/qemu-system-aarch64"),
    "aarch64-two-cells": on_arm(replace(TWO_CELLS, hugepage_kib=524288, interface=NIC, nat=NAT), mtu=1450),
    "aarch64-devices": on_arm(replace(DEVICES, hugepage_kib=524288), firmware=UEFI),
    # both sockets of a Grace superchip; one more than APIC IDs of eight bits reach
    "aarch64-288-vcpus": on_arm(large(GuestTopology(2, 1, 144, 1))),
    # both sockets of a Kunpeng 920, whose clusters have four cores; libvirt knows clusters from 10.1 on
    "aarch64-clusters": on_arm(large(GuestTopology(2, 16, 4, 1)), libvirt_version=11_003_000),
    "aarch64-clusters-libvirt-10.0": on_arm(large(GuestTopology(2, 16, 4, 1)), libvirt_version=10_000_000),
}
