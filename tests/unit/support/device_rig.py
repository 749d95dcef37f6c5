# SPDX-License-Identifier: Apache-2.0
"""A GPU node whose sysfs reacts, mounted: what tests of device handling share."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import msgspec
import pytest
from attribute_fs import AttributeFs, Folder, load, mounted
from fake_hca import IB, FakeRtnetlink, network
from fake_pci import FakePci
from fake_pci_device import Device, fail
from machine_tree import gpu_node

from vhpc_slurm.config import Config, Devices, Host, Paths, Placement
from vhpc_slurm.device import PassthroughDevice, VfIdentity
from vhpc_slurm.model import Generation
from vhpc_slurm.node import teardown
from vhpc_slurm.node.devices import quarantine, rtnetlink
from vhpc_slurm.node.devices.device_class import HostState
from vhpc_slurm.node.resource.device import AssignedDevice
from vhpc_slurm.node.store.journal import Journal
from vhpc_slurm.node.store.layout import Layout

GENERATION = Generation(7, 0, "0123abcd")


@dataclass
class Rig:
    """The machine, and what the product needs to work on it."""

    pci: FakePci
    fs: AttributeFs
    root: Path
    layout: Layout
    host: HostState
    kernel: FakeRtnetlink

    @property
    def gpus(self) -> list[Device]:
        return [d for _, d in sorted(self.pci.devices.items()) if (d.vendor, d.device) == (0x10DE, 0x2330)]

    @property
    def vfs(self) -> list[Device]:
        return [d for _, d in sorted(self.pci.devices.items()) if d.physfn]

    @property
    def pfs(self) -> list[Device]:
        return [d for _, d in sorted(self.pci.devices.items()) if d.total_vfs]

    def journal(self) -> Journal:
        return Journal(self.layout.journals, GENERATION)

    def give_to_host(self, device: Device, driver: str = "nvidia") -> None:
        """The state of a node where drivers of the host have the devices between jobs."""
        if driver and driver not in self.pci.drivers:
            self.pci.add_driver(type(self.pci.drivers["vfio-pci"])(driver))
        if device.driver:
            self.pci._detach(device)
        if driver:
            self.pci.drivers[driver].ids.add((device.vendor, device.device))
            self.pci._attach(self.pci.drivers[driver], device)

    def with_devices(self, **changes: object) -> None:
        """Change the configuration."""
        config = self.layout.config
        fields = {name: getattr(config.devices, name) for name in Devices.__struct_fields__} | changes
        self.layout = Layout(
            msgspec.structs.replace(config, devices=Devices(**fields)),
        )


def identity(device: Device) -> VfIdentity:
    """Some identity of its own."""
    number = int(device.address.replace(":", "").replace(".", ""), 16)
    return VfIdentity(
        0x02CD << 48 | number, 0x02CC << 48 | number, 0x1012, b"\x02" + number.to_bytes(5, "big"), 5
    )


def passthrough(*found: Device, role: str = "gpu") -> list[PassthroughDevice]:
    return [
        PassthroughDevice(
            device.address, role, 0, "pci0000:00", identity=identity(device) if role == "vf" else None
        )
        for device in found
    ]


@contextlib.contextmanager
def machine(tmp: Path, **size: int) -> Iterator[Rig]:
    """A node of one socket with two GPUs and one HCA with four VFs, unless told otherwise."""
    written = tmp / "written"
    shape = {"sockets": 1, "cores": 2, "threads": 1, "complexes": 1, "gpus": 2, "vfs": 4} | size
    tree: Folder = load(gpu_node(written, **shape).sys)
    pci = FakePci(tree)
    gpus = [name for name, d in sorted(pci.devices.items()) if d.vendor == 0x10DE]
    (tmp / "gpu.map").write_text("".join(f"{index} {name}\n" for index, name in enumerate(gpus)))
    (tmp / "proc").mkdir()
    kernel = FakeRtnetlink(tmp / "netlink")
    for index, pf in enumerate([d for _, d in sorted(pci.devices.items()) if d.total_vfs], 1):
        network(pci, kernel, pf, IB, index)
    with mounted(tmp / "sys", tree) as fs, kernel, mock.patch.object(rtnetlink, "connect", kernel.connect):
        config = Config(
            paths=Paths(state=str(tmp / "state"), run=str(tmp / "run"), log=str(tmp / "log")),
            host=Host(sysfs_root=str(tmp / "sys")),
            placement=Placement(gpu_map=str(tmp / "gpu.map")),
            devices=Devices(timeout_s=30),
        )
        host = HostState(proc=tmp / "proc", dev=str(tmp / "dev"))
        yield Rig(pci, fs, tmp, Layout(config), host, kernel)


def take(rig: Rig, *found: Device, role: str = "gpu") -> Journal:
    journal = rig.journal()
    AssignedDevice().take(rig.layout, journal, passthrough(*found, role=role), rig.host)
    return journal


def clear(rig: Rig, journal: Journal | None = None) -> None:
    """Release all, as the Epilog does."""
    if journal is not None:
        journal.close()
    teardown.clear(rig.layout, GENERATION, "n1")


def state(device: Device) -> tuple[str, str, tuple[str, ...]]:
    return device.driver, device.override, device.methods


def quarantined(rig: Rig) -> list[str]:
    return [record.key for record in quarantine.read_records(rig.layout)]


def opened(rig: Rig, gpu: Device) -> None:
    fds = rig.root / "proc/4711/fd"
    fds.mkdir(parents=True)
    (rig.root / "proc/4711/comm").write_text("qemu-system-x86\n")
    (fds / "9").symlink_to(f"{rig.host.dev}/vfio/{gpu.group}")


def reset_fails(rig: Rig, gpu: Device) -> None:
    def refuse(device: Device) -> None:
        raise fail(errno.ENOTTY)

    gpu.on_reset = refuse


@pytest.fixture(name="rig")
def device_rig(tmp_path: Path) -> Iterator[Rig]:
    with machine(tmp_path) as found:
        yield found
