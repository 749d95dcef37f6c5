# SPDX-License-Identifier: Apache-2.0
"""The device class of mediated devices (mdevs): created for a job, and removed after it.

The GPU map names the parent and the type.  The UUID follows from the parent and
the line, and is in the journal before the kernel gets it.  ``vhpc`` begins each
UUID, so that an mdev which no journal has is recognized on the node.

Sources: Documentation/driver-api/vfio-mediated-device.rst; drivers/vfio/mdev/mdev_core.c and
mdev_sysfs.c (EEXIST for a known UUID, EUSERS without an instance; a probe's own errors, such as ENOSPC
of samples/vfio-mdev/mtty.c; ``remove`` waits for a user of the device).
"""
# Decision: The key of an mdev is its UUID

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path

from vhpc_slurm.device import MDEV_KEY, MdevTraits, PassthroughDevice, mdev_parent
from vhpc_slurm.errors import NodeError
from vhpc_slurm.node.devices import gpumap
from vhpc_slurm.node.devices.device_class import DeviceClass, HostState, NotCleanError, State, check_closed
from vhpc_slurm.node.devices.preflight import CheckInput, DeviceAbsentError, DeviceError, device_path
from vhpc_slurm.node.host import attribute, sysfs
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.record import Record

API = "vfio-pci"


class NoMdevTypeError(DeviceError):
    """The parent offers no mdevs, or none of this type."""


class NoInstanceError(DeviceError):
    """The parent cannot create another mdev of this type now."""


class MdevExistsError(DeviceError):
    """The mdev exists already."""


class MdevType(Record, frozen=True):
    """A type of mdevs that a function offers.

    Attributes:
        parent: address of the function.
        type: name of its folder.
        name: of the vendor; may be empty.
        available: how many more can be created.
        devices: UUIDs of those that exist.
    """

    parent: str
    type: str
    name: str
    available: int
    devices: tuple[str, ...]


def offers(root: str) -> tuple[MdevType, ...]:
    """All types of mdevs that PCI functions of a host offer.  ``root`` is the path of sysfs."""
    parents = sysfs.listing(f"{root}/class/mdev_bus")
    return tuple(
        MdevType(
            parent,
            kind,
            sysfs.text_or_empty(f"{_type_path(root, parent, kind)}/name"),
            _count(sysfs.text_or_empty(f"{_type_path(root, parent, kind)}/available_instances")),
            tuple(sysfs.listing(f"{_type_path(root, parent, kind)}/devices")),
        )
        for parent in parents
        for kind in sysfs.listing(f"{device_path(root, parent)}/mdev_supported_types")
    )


class Mdev(DeviceClass):
    """Mediated devices."""

    traits = MdevTraits()
    noun = "mediated device"
    unparked = "still exists"

    def parents(self, layout: Layout) -> Iterable[tuple[str, str]]:
        """Each mdev of the GPU map with its parent."""
        named = gpumap.types(Path(layout.config.placement.gpu_map), gpumap.MDEV)
        return [(key, mdev_parent(key)) for key in named]

    def exists(self, layout: Layout, key: str) -> bool:
        """Whether the parent exists."""
        return bool(sysfs.listing(device_path(layout.config.host.sysfs_root, mdev_parent(key))))

    def check(self, case: CheckInput, key: str) -> State:
        """Check that the mdev does not exist and can be created."""
        if _is_there(case.root, key):
            raise MdevExistsError(
                f"mediated device {key} exists already", "no job has created it", "run: vhpc reconcile"
            )
        self.offered(case, key)
        return {"type": case.types[key]}

    def offered(self, case: CheckInput, key: str) -> None:
        """Check the parent, the type, and the number of instances that the job's mdevs need."""
        kind, parent = _offered_type(case, key), mdev_parent(key)
        alike = [one for one in case.mine if MDEV_KEY.fullmatch(one) and mdev_parent(one) == parent]
        wanted = [one for one in alike if case.types.get(one) == kind and not _is_there(case.root, one)]
        left = _left(case, parent, kind)
        if left < len(wanted):
            raise NoInstanceError(
                f"{len(wanted)} mediated devices of type {kind} cannot be created at {parent}",
                f"available_instances is {left}",
                "other mdevs of this GPU use its instances; or the GPU map has too many lines",
            )

    def prepare(self, layout: Layout, device: PassthroughDevice, state: State) -> None:
        """Create the mdev."""
        root, key, kind = layout.config.host.sysfs_root, device.key, str(state["type"])
        path = f"{_type_path(root, mdev_parent(key), kind)}/create"
        try:
            attribute.write_attribute(path, key, layout.config.devices.timeout_s)
        except OSError as err:
            raise NodeError(
                f"mediated device {key} of type {kind} cannot be created",
                f"{path}: {os.strerror(err.errno or 0)}",
                "see dmesg",
            ) from err
        made = sysfs.link(f"{_path(root, key)}/mdev_type").rpartition("/")[2]
        if made != kind:
            raise NodeError(
                f"mediated device {key} is of type {made or 'none'}", f"{kind} was requested", "see dmesg"
            )

    def idle(self, layout: Layout) -> Iterable[str]:
        """All mdevs of the node with a key of vhpc."""
        return [key for key in _existing(layout.config.host.sysfs_root) if MDEV_KEY.fullmatch(key)]

    def why_not_parked(self, layout: Layout, key: str) -> str:
        """It exists."""
        return "it exists" if _is_there(layout.config.host.sysfs_root, key) else ""

    def park(self, layout: Layout, key: str) -> None:
        """Remove the mdev."""
        self._remove(layout, key, HostState())

    def release(self, layout: Layout, key: str, state: State, host: HostState) -> None:  # noqa: ARG002 - key says all
        """Remove the mdev: its memory and registers end with it."""
        self._remove(layout, key, host)

    def clear(self, case: CheckInput, layout: Layout, key: str, state: State) -> None:  # noqa: ARG002 - key says all
        """Remove the mdev, and check that its type is still offered if the GPU map has it."""
        self._remove(layout, key, HostState(proc=case.proc, dev=case.dev))
        if key in case.types:
            _offered_type(case, key)

    def _remove(self, layout: Layout, key: str, host: HostState) -> None:
        root, config = layout.config.host.sysfs_root, layout.config.devices
        if not _is_there(root, key):
            return
        # the kernel waits until a process closes it
        group = sysfs.link(f"{_path(root, key)}/iommu_group").rpartition("/")[2]
        if group.isdecimal():
            case = CheckInput(root, config, frozenset((key,)), {}, host.proc, host.dev)
            check_closed(case, key, int(group))
        try:
            attribute.write_attribute(f"{_path(root, key)}/remove", "1", config.timeout_s)
        except OSError as err:
            if err.errno not in (errno.ENOENT, errno.ENODEV):  # another process was faster
                raise
        if _is_there(root, key):
            raise NotCleanError(f"mediated device {key} still exists after its removal", "", "see dmesg")


def _offered_type(case: CheckInput, key: str) -> str:
    """The type of an mdev, which its parent offers; DeviceError if not."""
    parent, kind = mdev_parent(key), case.types.get(key, "")
    if not sysfs.listing(device_path(case.root, parent)):
        raise DeviceAbsentError(
            f"{parent}, the parent of mediated device {key}, is not there", "", "compare with lspci -D"
        )
    if not kind:
        raise NoMdevTypeError(f"mediated device {key} has no type", "the GPU map has no line for it")
    if parent not in sysfs.listing(f"{case.root}/class/mdev_bus"):
        raise NoMdevTypeError(
            f"{parent} offers no mediated devices",
            f"{case.root}/class/mdev_bus/{parent} does not exist",
            "load its vendor's driver for vGPUs; drivers for Linux 6.8 and later have vgpu=TYPE instead",
        )
    there = sysfs.listing(f"{device_path(case.root, parent)}/mdev_supported_types")
    if kind not in there:
        raise NoMdevTypeError(
            f"{parent} offers no mediated devices of type {kind}",
            f"its types are {', '.join(there) or 'none'}",
            "correct the GPU map",
        )
    api = sysfs.text_or_empty(f"{_type_path(case.root, parent, kind)}/device_api")
    if api != API:
        raise NoMdevTypeError(f"mediated devices of type {kind} have the API {api or 'none'}, not {API}")
    return kind


def _type_path(root: str, parent: str, kind: str) -> str:
    return f"{device_path(root, parent)}/mdev_supported_types/{kind}"


def _path(root: str, key: str) -> str:
    return f"{root}/bus/mdev/devices/{key}"


def _existing(root: str) -> list[str]:
    return sysfs.listing(f"{root}/bus/mdev/devices")


def _is_there(root: str, key: str) -> bool:
    return key in _existing(root)


def _left(case: CheckInput, parent: str, kind: str) -> int:
    path = f"{_type_path(case.root, parent, kind)}/available_instances"
    try:
        return _count(attribute.read_attribute(path, case.config.timeout_s))
    except OSError as err:
        raise NoMdevTypeError(f"{path} cannot be read", str(err.strerror), "see dmesg") from err


def _count(text: str) -> int:
    return int(text) if text.isdecimal() else 0
