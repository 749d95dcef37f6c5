# SPDX-License-Identifier: Apache-2.0
"""A device class that the product does not have: mediated devices, created for each job.

The class is complete enough to go through a job; ``FakeMdev`` is the kernel's
side, as Documentation/driver-api/vfio-mediated-device.rst describes it, with the
errors of drivers/vfio/mdev/mdev_core.c and mdev_sysfs.c (Linux 6.12).
"""

from __future__ import annotations

import errno
import os
import re
import uuid
from collections.abc import Iterable

from attribute_fs import Attribute, Folder, Link, fixed
from device_rig import Rig
from fake_pci_device import Device, fail

from vhpc_slurm.device import DeviceTraits, HostdevSource, PassthroughDevice
from vhpc_slurm.errors import NodeError
from vhpc_slurm.hardware import PciBar, PciFunction
from vhpc_slurm.node.devices.device_class import DeviceClass, HostState, NotCleanError, State
from vhpc_slurm.node.devices.preflight import CheckInput, DeviceError
from vhpc_slurm.node.host import attribute, sysfs
from vhpc_slurm.node.store.layout import Layout

TYPE = "nvidia-474"
BUS = "bus/mdev/devices"


class FakeMdev:
    """The types of one physical device, and the mdevs of the host."""

    def __init__(self, rig: Rig, parent: Device, instances: int = 2) -> None:
        self.tree, self.parent, self.left = rig.pci.tree, parent, instances
        self.made: set[str] = set()
        self.busy = False
        self.bus = self.tree.folder(BUS)
        kind = f"{parent.path}/mdev_supported_types/{TYPE}"
        self.tree.put(f"{kind}/create", Attribute(store=self.create))
        self.tree.put(f"{kind}/available_instances", Attribute(lambda: f"{self.left}\n"))
        self.tree.put(f"{kind}/device_api", fixed("vfio-pci\n"))
        self.tree.put(f"{kind}/devices", Folder())
        self.tree.put(f"class/mdev_bus/{parent.address}", Link(f"../../{parent.path}"))

    def create(self, text: str) -> None:
        """As mdev_device_create: the same UUID may exist once on a host."""
        name = str(uuid.UUID(text.strip()))
        if name in self.bus.entries:
            raise fail(errno.EEXIST)
        if self.busy or not self.left:
            raise fail(errno.EBUSY if self.busy else errno.EUSERS)
        self.left -= 1
        self.made.add(name)
        own = f"{self.parent.path}/{name}"
        self.tree.put(f"{own}/remove", Attribute(store=lambda text: self.remove(name, text)))
        self.tree.put(f"{own}/mdev_type", Link(f"../mdev_supported_types/{TYPE}"))
        self.tree.put(f"{BUS}/{name}", Link(f"../../../{own}"))

    def remove(self, name: str, text: str) -> None:
        """The vendor's driver may refuse it for an active device."""
        if self.busy:
            raise fail(errno.EBUSY)
        if text.strip() == "1":
            self.left += 1
            self.made.remove(name)
            self.tree.drop(f"{BUS}/{name}")
            self.tree.drop(f"{self.parent.path}/{name}")


class MdevTraits(DeviceTraits):
    """A mediated device of a GPU; Slurm counts it as a GPU."""

    name = "mdev"
    key_form = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.ASCII)
    key_name = "mdev's UUID"
    indexed = True
    iommu = False

    def owns(self, key: str, place: PciFunction, *, allowed: bool) -> bool:
        return self.key_form.fullmatch(key) is not None

    def bars(self, place: PciFunction) -> tuple[PciBar, ...]:
        return (PciBar(0, 16 << 20, memory=True, wide=True, prefetchable=True),)

    def source(self, key: str) -> HostdevSource:
        return HostdevSource("mdev", (("model", "vfio-pci"),), (("uuid", key),))


class Mdev(DeviceClass):
    """Mediated devices that the site has named, each with its parent."""

    traits = MdevTraits()
    noun = "mediated device"

    def __init__(self, named: dict[str, str]) -> None:
        self.named = named

    def parents(self, layout: Layout) -> Iterable[tuple[str, str]]:
        return self.named.items()

    def exists(self, layout: Layout, key: str) -> bool:
        return bool(sysfs.listing(self._type(layout.config.host.sysfs_root, key)))

    def check(self, case: CheckInput, key: str) -> State:
        if key in sysfs.listing(f"{case.root}/{BUS}"):
            raise DeviceError(f"device {key} is there already", "another program has created it")
        if sysfs.text_or_empty(f"{self._type(case.root, key)}/available_instances") in ("", "0"):
            raise DeviceError(f"device {key} cannot be created", "all instances are in use")
        return {"parent": self.named[key]}

    def prepare(self, layout: Layout, device: PassthroughDevice, state: State) -> None:
        path = f"{self._type(layout.config.host.sysfs_root, device.key)}/create"
        try:
            attribute.write_attribute(path, device.key, layout.config.devices.timeout_s)
        except OSError as err:
            raise NodeError(f"device {device.key} cannot be created", os.strerror(err.errno or 0)) from err

    def idle(self, layout: Layout) -> Iterable[str]:
        there = sysfs.listing(f"{layout.config.host.sysfs_root}/{BUS}")
        return [key for key in there if key in self.named]

    def why_not_parked(self, layout: Layout, key: str) -> str:
        return "it exists" if key in self.idle(layout) else ""

    def park(self, layout: Layout, key: str) -> None:
        if key in self.idle(layout):
            path = f"{layout.config.host.sysfs_root}/{BUS}/{key}/remove"
            attribute.write_attribute(path, "1", layout.config.devices.timeout_s)
        if key in self.idle(layout):
            raise NotCleanError(f"device {key} still exists")

    def release(self, layout: Layout, key: str, state: State, host: HostState) -> None:
        self.park(layout, key)

    def clear(self, case: CheckInput, layout: Layout, key: str, state: State) -> None:
        self.park(layout, key)

    def _type(self, root: str, key: str) -> str:
        return f"{root}/bus/pci/devices/{self.named[key]}/mdev_supported_types/{TYPE}"
