# SPDX-License-Identifier: Apache-2.0
"""Job or node as the cause of a guest that does not start, from libvirt's own words.

The texts were said by libvirt 9.0, 11.3 and 12.8 with QEMU 7.2, 10.0 and 11.1.
``tests/lab/test_refused_guests.py`` asks a real libvirt.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from domain_cases import CASES, SHARES, changed
from placement_rig import host

from vhpc_slurm.domain.render import render
from vhpc_slurm.domain.spec import DomainSpec
from vhpc_slurm.errors import NodeError, UserError
from vhpc_slurm.model import (
    GuestCell,
    GuestInterface,
    GuestPaths,
    GuestPlan,
    GuestTopology,
    HostInventory,
    MemoryBinding,
    NatInterface,
    RunningGuest,
    SiteInterface,
    SitePort,
    VcpuPin,
)
from vhpc_slurm.node.guest import libvirtd, refusal
from vhpc_slurm.node.guest.libvirtd import DomainRefusedError

NODE = host(sockets=2, cores=2)
LARGE = CASES["256-vcpus-devices"]
STAMP = "2026-11-22T06:45:28.643733Z "
CAPABILITIES = """<capabilities><host><cpu><arch>x86_64</arch></cpu><topology><cells num="{count}">{cells}
</cells></topology></host></capabilities>"""


def capabilities(inventory: HostInventory) -> str:
    """libvirt's capabilities of a host if it sees the same as the kernel."""

    def cpus(numbers: tuple[int, ...]) -> str:
        core = {cpu.os_cpu: cpu.core for cpu in inventory.cpus}
        siblings = {
            cpu: ",".join(str(other) for other in sorted(core) if core[other] == core[cpu]) for cpu in numbers
        }
        return "".join(f'<cpu id="{cpu}" siblings="{siblings[cpu]}"/>' for cpu in numbers)

    cells = "".join(f'<cell id="{c.cell}"><cpus>{cpus(c.cpus)}</cpus></cell>' for c in inventory.cells)
    return CAPABILITIES.format(count=len(inventory.cells), cells=cells)


@dataclass
class Libvirt:
    """libvirt as ``refusal`` sees it: ``refuses`` has its words for a domain, empty when it starts it."""

    refuses: Callable[[ET.Element], str]
    host: HostInventory = NODE
    most: int = 288
    qemu: int = 10_000_000
    made: list[ET.Element] = field(default_factory=list)
    alive: list[str] = field(default_factory=list)

    def create(self, xml: str, _timeout_s: float, *, paused: bool = False) -> None:
        self.check(xml)
        domain = ET.fromstring(xml)
        self.made.append(domain)
        if paused:
            self.alive.append(domain.findtext("name", ""))

    def check(self, xml: str) -> None:
        if words := self.refuses(ET.fromstring(xml)):
            raise DomainRefusedError("cannot start the guest", words, "see libvirt's and QEMU's logs")

    def destroy(self, name: str) -> None:
        self.alive.remove(name)

    def capabilities(self) -> str:
        return capabilities(self.host)

    def most_vcpus(self, _kind: str, _architecture: object, _emulator: str = "") -> int:
        return self.most

    def version(self) -> tuple[int, int]:
        return 9_000_000, self.qemu


def started(libvirt: Libvirt, spec: DomainSpec = LARGE) -> None:
    stand_in: Any = libvirt
    try:
        libvirt.create(render(spec), 30)
    except DomainRefusedError as err:
        raise refusal.judge(stand_in, replace(spec, host=NODE), err) from err
    finally:
        assert libvirt.alive == []


def vcpus(domain: ET.Element) -> int:
    return int(domain.findtext("vcpu", ""))


@pytest.mark.parametrize(
    "words",
    [
        "unsupported configuration: more than 255 vCPUs require extended interrupt mode enabled on the iommu "
        "device",
        "internal error: process exited while connecting to monitor: "
        f"{STAMP}qemu-system-x86_64: Address space limit 0xffffffffff < 0x56dc3fffffff "
        "phys-bits too low (40)",
        "internal error: QEMU unexpectedly closed the monitor (vm='vhpc-42-0-9f3ac1d2-g0'): "
        f"{STAMP}qemu-system-x86_64: Error while loading elf kernel",
        # as RHEL names QEMU
        "internal error: QEMU unexpectedly closed the monitor (vm='vhpc-42-0-9f3ac1d2-g0'): "
        f"{STAMP}qemu-kvm: Maximum supported vfio devices (64) already attached",
    ],
)
def test_a_refusal_of_this_job_alone_fails_the_job(words: str) -> None:
    libvirt = Libvirt(lambda domain: words if vcpus(domain) > 1 else "")
    with pytest.raises(refusal.RefusedGuestError) as caught:
        started(libvirt)
    assert caught.value.kind == "user"
    assert libvirt.alive == []
    assert "2026" not in caught.value.cause
    assert "vhpc-42" not in caught.value.cause
    assert caught.value.cause == (
        words if words.startswith("unsupported") else f"QEMU: {words.rpartition(': ')[2]}"
    )


@pytest.mark.promise("user.limits")
def test_an_own_image_that_is_refused_is_no_alarm() -> None:
    libvirt: Any = Libvirt(lambda domain: "internal error: odd" if vcpus(domain) > 1 else "")
    err = DomainRefusedError("cannot start the guest", "internal error: odd", "see QEMU's log")
    judged = refusal.judge(libvirt, replace(LARGE, host=NODE), err, own_image=True)
    assert type(judged) is UserError
    assert "check your image" in judged.line()


def test_a_node_that_starts_no_guest_is_at_fault() -> None:
    lost = "internal error: process exited while connecting to monitor: qemu: symbol lookup error: libfoo.so"
    with pytest.raises(NodeError, match=r"no guest starts on n1: .*libfoo"):
        started(Libvirt(lambda _: lost))


def test_a_qemu_without_required_features_is_a_node_error() -> None:
    def without_virtiofs(domain: ET.Element) -> str:
        shared = domain.find("devices/filesystem") is not None
        return "unsupported configuration: virtiofs is not supported with this QEMU binary" if shared else ""

    with pytest.raises(NodeError, match=r"no guest starts on n1: .*virtiofs"):
        started(Libvirt(without_virtiofs))


@pytest.mark.parametrize(
    "words",
    [
        f"process exited while connecting to monitor: {STAMP}qemu-system-x86_64: unable to map backing store "
        "for guest RAM: Cannot allocate memory",
        f"process exited while connecting to monitor: {STAMP}qemu-system-x86_64: -device vfio-pci,host="
        "0000:0b:00.0: vfio 0000:0b:00.0: failed to open /dev/vfio/12: Device or resource busy",
        f"process exited while connecting to monitor: {STAMP}qemu-system-x86_64: os_mem_prealloc: "
        "Insufficient free host memory pages available to allocate guest RAM",
        "unsupported configuration: NUMA node 7 is unavailable",
        "unsupported configuration: host doesn't support passthrough of host PCI devices",
        "unsupported configuration: VFIO PCI device assignment is not supported by the host",
    ],
)
def test_a_fault_of_the_node_costs_no_second_start(words: str) -> None:
    libvirt = Libvirt(lambda domain: words if vcpus(domain) > 1 else "")
    with pytest.raises(NodeError, match="cannot start the guest"):
        started(libvirt)
    assert libvirt.made == []


def test_a_libvirt_with_stale_capabilities_must_be_restarted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    old = host(sockets=1, cores=4)
    libvirt = Libvirt(lambda domain: "internal error: odd" if vcpus(domain) > 1 else "", host=old)
    with pytest.raises(NodeError, match=r"odd; libvirt has .*restart libvirtd"):
        started(libvirt)
    monkeypatch.setattr(libvirtd, "SEPARATE", tmp_path)
    with pytest.raises(NodeError, match="restart virtqemud"):
        started(libvirt)


def test_an_unreachable_libvirt_is_the_nodes_fault() -> None:
    class Gone(Libvirt):
        def check(self, xml: str) -> None:
            raise NodeError("cannot start the guest", f"no answer to {len(xml)} bytes")

    with pytest.raises(NodeError, match="no answer") as caught:
        started(Gone(lambda _: ""))
    assert not isinstance(caught.value, UserError)


SMALL = CASES["kvm-intel"]
# Fields of a guest that job or image decide, with what a job may ask for; a new field is added here or below.
WISHES: dict[str, Any] = {
    "cmdline": "quiet",
    "kernel": "/run/vhpc/jobs/42/g0/other-kernel",
    "initrd": "/run/vhpc/jobs/42/g0/other-initrd",
    "disk": "/var/lib/vhpc/disks/vhpc-42-0-9f3ac1d2-g0.disk",
    "shares": (*SMALL.running.shares, *SHARES[1:]),
    "mtu": 1450,
    "site_port": SitePort("vhpcs0", "06:00:00:01:00:03", "10.0.0.4/24", 1500),
    "pins": (*SMALL.guest.pins, VcpuPin(2, 9, 0)),
    "topology": GuestTopology(1, 1, 1, 2),
    "cells": (GuestCell(0, (0, 1), 2048, 0, nodeset=(0,)),),
    "memory_mib": 2048,
    "emulator_cpus": (0, 1),
    "emulator_choice": "the first core",
    "hugepage_kib": 2048,
    "memory_binding": MemoryBinding.STRICT,
    "devices": LARGE.guest.devices,
    "controllers": LARGE.guest.controllers,
    "pcihole64_gib": 64,
    "address_bits": 46,
    "start_timeout_s": 77,
    "boot_timeout_s": 777,
    "nccl_topology": "<system/>",
    "port_guids": (1, 2),
    "interface": GuestInterface("vhpct1", "06:00:00:01:00:01", 1, "10.0.0.1/16", "fd00::1/64"),
    "nat": NatInterface("06:00:00:01:00:02", "10.0.0.2/24", "10.0.0.3", 1500),
    "site": SiteInterface("br0", 1, "10.0.0.1"),
    "disk_mib": 512,
    "disk_mount": "/scratch",
}
OF_THE_NODE = {
    *("name", "generation", "host", "manifest", "gid", "libvirt_version", "emulator", "partition"),
    "firmware",
    *("uid", "run_dir", "root", "agent_socket", "console_log", "index", "hostname", "saveable"),
}


@pytest.mark.promise("boot.refused")
def test_each_field_of_a_guest_is_the_jobs_or_the_nodes() -> None:
    kinds = (DomainSpec, RunningGuest, GuestPlan, GuestPaths)
    names = {name for kind in kinds for name in kind.__struct_fields__} - {"running", "plan", "paths"}
    assert names | {"cmdline"} == WISHES.keys() | OF_THE_NODE
    assert not WISHES.keys() & OF_THE_NODE


@pytest.mark.promise("boot.refused")
@pytest.mark.parametrize("name", WISHES)
def test_the_small_guest_keeps_no_wish_of_the_job(name: str) -> None:
    asked = changed(SMALL, **{name: WISHES[name]})
    assert asked != SMALL
    assert refusal.smallest(asked) == refusal.smallest(SMALL)


@pytest.mark.parametrize(
    ("asked", "part"),
    [
        (CASES["disk"], "devices/disk/target[@dev='vdb']"),
        (changed(SMALL, site=WISHES["site"], site_port=WISHES["site_port"]), "devices/interface"),
    ],
    ids=["disk", "site"],
)
def test_a_disk_or_site_interface_that_is_refused_fails_the_job(asked: DomainSpec, part: str) -> None:
    assert ET.fromstring(render(asked)).find(part) is not None
    with pytest.raises(refusal.RefusedGuestError):
        started(Libvirt(lambda domain: "" if domain.find(part) is None else "internal error: odd"), asked)


def test_the_probe_guest_has_no_option_of_the_job() -> None:
    libvirt = Libvirt(lambda domain: "internal error: odd" if vcpus(domain) > 1 else "")
    with pytest.raises(refusal.RefusedGuestError):
        started(libvirt)
    (small,) = libvirt.made
    assert vcpus(small) == 1
    served = ("devices/filesystem", "devices/channel/source[@mode='connect']")
    for path in ("os/kernel", "numatune", "devices/hostdev", "devices/iommu", *served):
        assert small.find(path) is None, path
    # and all that is the node's
    large = ET.fromstring(render(LARGE))
    for path in ("name", "seclabel/label", "os/type"):
        assert small.findtext(path) == large.findtext(path), path
    assert small.get("type") == large.get("type")


def test_a_guest_that_starts_is_started_once() -> None:
    libvirt = Libvirt(lambda _: "")
    started(libvirt)
    assert [vcpus(domain) for domain in libvirt.made] == [256]


@pytest.mark.promise("place.many-vcpus")
@pytest.mark.parametrize(
    ("case", "kvm", "most", "qemu", "refused"),
    [
        ("255-vcpus", True, 0, 0, None),  # not even asked
        ("256-vcpus", True, 288, 7_002_000, None),
        ("288-vcpus-tcg", False, 288, 7_002_000, 255),
        ("288-vcpus-tcg", False, 4096, 10_000_000, None),
        ("512-vcpus", True, 288, 7_002_000, 288),
        ("512-vcpus", True, 1024, 10_000_000, None),
    ],
)
def test_too_many_vcpus_for_qemu_is_a_user_error(
    case: str, kvm: bool, most: int, qemu: int, refused: int | None
) -> None:
    libvirt: Any = Libvirt(lambda _: "", most=most, qemu=qemu)
    node = replace(NODE, kvm=kvm)
    guests = [CASES[case].guest]
    if refused is None:
        refusal.check_vcpus(libvirt, guests, node, "")
        return
    with pytest.raises(UserError, match=f"at most {refused} .*--vhpc-guests-per-node"):
        refusal.check_vcpus(libvirt, guests, node, "")
