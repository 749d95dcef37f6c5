# SPDX-License-Identifier: Apache-2.0
"""The kernel's side of mediated devices, and of vGPUs that are set in sysfs.

==========================  ==========================================================================
``create``                  Linux 6.12, drivers/vfio/mdev/mdev_sysfs.c (create_store: EINVAL for a text that
                            is not 36 characters of a UUID and at most a newline), mdev_core.c
                            (mdev_device_create: EEXIST, EUSERS where the core counts the instances)
errors of the vendor        what the driver's probe returns: ENOSPC of samples/vfio-mdev/mtty.c
``remove``                  remove_store: only a number other than 0 removes, and ENODEV where the file
                            is removed already (kernfs); vfio_main.c
                            (vfio_unregister_group_dev) waits until a process has closed it
``available_instances``     Documentation/driver-api/vfio-mediated-device.rst; types share the parent's
                            memory, as NVIDIA Virtual GPU Software User Guide says of time-sliced vGPUs
``current_vgpu_type``,      the formats of NVIDIA/vgpu-device-manager, pkg/vfio. The driver is not public:
``creatable_vgpu_types``    its error numbers (EINVAL, ENOSPC, EBUSY) are an assumption
==========================  ==========================================================================
"""

from __future__ import annotations

import errno
import uuid
from dataclasses import dataclass, field
from functools import partial

from attribute_fs import Attribute, Folder, Link, Stuck, fixed
from device_rig import Rig
from fake_pci_device import Device, fail

TYPE, LARGE = "nvidia-474", "nvidia-478"
BUS = "bus/mdev/devices"
MIG, WHOLE = ("1414", "NVIDIA H200X-1-18C"), ("1428", "NVIDIA H200X-141C")


class FakeMdev:
    """The mdev types of one physical device, and its mdevs.

    Attributes:
        left: parts of its memory; an mdev of ``TYPE`` takes one, of ``LARGE`` four.
        full: error of a creation without memory.
        refuse: error of each creation and removal, if not 0.
        opened: mdevs that a process has open.
    """

    def __init__(self, rig: Rig, parent: Device, parts: int = 2) -> None:
        self.tree, self.parent, self.left = rig.pci.tree, parent, parts
        self.full, self.refuse = errno.ENOSPC, 0
        self.made: dict[str, str] = {}
        self.opened: set[str] = set()
        self.groups = 1000
        self.bus = self.tree.folder(BUS)
        for kind, size, name in ((TYPE, 1, "GRID A100-4C"), (LARGE, 4, "GRID A100-16C")):
            path = f"{parent.path}/mdev_supported_types/{kind}"
            self.tree.put(f"{path}/create", Attribute(store=partial(self._create, kind, size)))
            self.tree.put(f"{path}/available_instances", Attribute(partial(self._instances, size)))
            self.tree.put(f"{path}/device_api", fixed("vfio-pci\n"))
            self.tree.put(f"{path}/name", fixed(f"{name}\n"))
            self.tree.put(f"{path}/devices", Folder())
        self.tree.put(f"class/mdev_bus/{parent.address}", Link(f"../../{parent.path}"))

    def create(self, text: str, kind: str = TYPE) -> None:
        """As a write to ``create`` of a type."""
        self._create(kind, 1 if kind == TYPE else 4, text)

    def _instances(self, size: int) -> str:
        return f"{self.left // size}\n"

    def _create(self, kind: str, size: int, text: str) -> None:
        if len(text) not in (36, 37):
            raise fail(errno.EINVAL)
        try:
            name = str(uuid.UUID(text.strip()))
        except ValueError:
            raise fail(errno.EINVAL) from None
        if name in self.bus.entries:
            raise fail(errno.EEXIST)
        if self.refuse or self.left < size:
            raise fail(self.refuse or self.full)
        self.left -= size
        self.made[name] = kind
        own = f"{self.parent.path}/{name}"
        self.groups += 1
        self.tree.put(f"{own}/remove", Attribute(store=partial(self._remove, name, size)))
        self.tree.put(f"{own}/mdev_type", Link(f"../mdev_supported_types/{kind}"))
        self.tree.put(f"{own}/iommu_group", Link(f"../../../kernel/iommu_groups/{self.groups}"))
        self.tree.put(f"{BUS}/{name}", Link(f"../../../{own}"))
        self.tree.put(
            f"{self.parent.path}/mdev_supported_types/{kind}/devices/{name}", Link(f"../../../{name}")
        )

    def group(self, name: str) -> int:
        """Number of the IOMMU group of an mdev."""
        node = self.tree.folder(f"{self.parent.path}/{name}").entries["iommu_group"]
        assert isinstance(node, Link)
        return int(node.target.rpartition("/")[2])

    def _remove(self, name: str, size: int, text: str) -> None:
        if name not in self.made:  # another writer was faster
            raise fail(errno.ENODEV)
        if not text.strip().isdecimal():
            raise fail(errno.EINVAL)
        if self.refuse:
            raise fail(self.refuse)
        if name in self.opened:
            raise Stuck
        if int(text):
            self.left += size
            kind = self.made.pop(name)
            self.tree.drop(f"{BUS}/{name}")
            self.tree.drop(f"{self.parent.path}/mdev_supported_types/{kind}/devices/{name}")
            self.tree.drop(f"{self.parent.path}/{name}")


@dataclass
class FakeVgpus:
    """Virtual functions of a GPU, which NVIDIA's driver makes vGPUs.

    Attributes:
        rig, gpu: the machine, and the GPU.
        count: of virtual functions.
        instances: free GPU instances of MIG; a whole GPU needs all seven.
        refuse: error of each write, if not 0.
        deaf: the driver takes a write and forgets it.
    """

    rig: Rig
    gpu: Device
    count: int = 2
    instances: int = 7
    refuse: int = 0
    deaf: bool = False
    now: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        pci = self.rig.pci
        self.rig.give_to_host(self.gpu)
        for number in range(self.count):
            pci._make_vf(self.gpu, number)
            vf = pci.devices[self.gpu.virtfns[number]]
            self.rig.give_to_host(vf)
            self.now[vf.address] = "0"
            vf.folder.put("nvidia/creatable_vgpu_types", Attribute(self._creatable))
            vf.folder.put(
                "nvidia/current_vgpu_type",
                Attribute(partial(self._show, vf.address), partial(self.set, vf.address)),
            )

    @property
    def vfs(self) -> list[Device]:
        return [self.rig.pci.devices[address] for address in self.gpu.virtfns]

    def _free(self) -> list[tuple[str, str]]:
        free = self.instances - sum(7 if kind == WHOLE[0] else 1 for kind in self.now.values() if kind != "0")
        return [kind for kind, size in ((MIG, 1), (WHOLE, 7)) if free >= size]

    def _creatable(self) -> str:
        return "ID    : vGPU Name\n" + "".join(f"{number:<6}: {name}\n" for number, name in self._free())

    def _show(self, address: str) -> str:
        return f"{self.now[address]}\n"

    def set(self, address: str, text: str) -> None:
        """As a write to ``current_vgpu_type``."""
        kind = text.strip()
        if self.refuse:
            raise fail(self.refuse)
        if kind not in ("0", MIG[0], WHOLE[0]):
            raise fail(errno.EINVAL)
        if self.deaf:
            return
        if kind != "0":
            if self.now[address] != "0":
                raise fail(errno.EBUSY)
            if kind not in [number for number, _ in self._free()]:
                raise fail(errno.ENOSPC)
        self.now[address] = kind
