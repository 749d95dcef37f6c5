# SPDX-License-Identifier: Apache-2.0
"""The device class of vGPUs without mdev: virtual functions that stay with NVIDIA's VFIO driver.

Since Linux 6.8 a write of a type's number to ``nvidia/current_vgpu_type`` of a
virtual function makes it a vGPU, and 0 ends this.  The driver gives the vGPU its
part of the GPU's memory, which a type backed by MIG takes from a GPU instance.
vhpc neither binds nor resets the function, and cannot check that its memory was cleared.

Sources: NVIDIA Virtual GPU Software User Guide (vendor-specific VFIO framework of Linux with KVM);
github.com/NVIDIA/vgpu-device-manager, pkg/vfio (the formats of the files).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from vhpc_slurm.device import PassthroughDevice, VgpuTraits
from vhpc_slurm.errors import NodeError, VhpcError
from vhpc_slurm.node.devices import aer, gpumap, preflight
from vhpc_slurm.node.devices.device_class import DeviceClass, HostState, NotCleanError, State, check_closed
from vhpc_slurm.node.devices.preflight import (
    CheckInput,
    DeviceAbsentError,
    DeviceError,
    bound_to,
    device_path,
)
from vhpc_slurm.node.host import attribute, sysfs
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.record import Record

NONE = "0"
ANY_DRIVER = ""
"""Holders are those of the IOMMU group: daemons of NVIDIA's driver have its device files open."""
_CREATABLE = re.compile(r"^\s*([0-9]{1,9})\s*:\s*(\S.*?)\s*$", re.ASCII | re.MULTILINE)


class NoVgpuDriverError(DeviceError):
    """The driver of the virtual function makes no vGPUs."""


class NoVgpuTypeError(DeviceError):
    """The virtual function cannot become a vGPU of its type now."""


class VgpuExistsError(DeviceError):
    """The virtual function is a vGPU already."""


class VgpuType(Record, frozen=True):
    """A type: its number, and the name that NVIDIA's documents have for it."""

    number: str
    name: str


class VgpuFunction(Record, frozen=True):
    """A virtual function that can be a vGPU.

    Attributes:
        address: of the function.
        physfn: of its GPU.
        current: number of its type; ``0`` for none.
        creatable: types that it can become now.
    """

    address: str
    physfn: str
    current: str
    creatable: tuple[VgpuType, ...]


def functions(root: str) -> tuple[VgpuFunction, ...]:
    """All virtual functions of a host whose driver makes vGPUs.  ``root`` is the path of sysfs."""
    found = []
    for address in sysfs.listing(f"{root}/bus/pci/devices"):
        now = sysfs.text_or_empty(f"{_folder(root, address)}/current_vgpu_type")
        if now:
            physfn = sysfs.link(f"{device_path(root, address)}/physfn").rpartition("/")[2]
            kinds = _types(sysfs.text_or_empty(f"{_folder(root, address)}/creatable_vgpu_types"))
            found.append(VgpuFunction(address, physfn, now, kinds))
    return tuple(found)


def creatable(root: str, address: str, timeout_s: float) -> tuple[VgpuType, ...]:
    """Types that a virtual function can become now; StuckError, OSError if the kernel does not say."""
    return _types(attribute.read_attribute(f"{_folder(root, address)}/creatable_vgpu_types", timeout_s))


def _types(text: str) -> tuple[VgpuType, ...]:
    return tuple(VgpuType(number, name.split()[-1]) for number, name in _CREATABLE.findall(text))


def current(root: str, address: str, timeout_s: float) -> str:
    """Number of the type that it has: ``0`` for none, empty if its driver makes no vGPUs.

    Raises:
        StuckError, OSError: the kernel does not say.
    """
    try:
        return attribute.read_attribute(f"{_folder(root, address)}/current_vgpu_type", timeout_s)
    except OSError as err:
        if err.errno in sysfs.ABSENT:
            return ""
        raise


class Vgpu(DeviceClass):
    """Virtual functions of NVIDIA GPUs."""

    traits = VgpuTraits()
    noun = "vGPU"
    unparked = "still has a vGPU type"

    def exists(self, layout: Layout, key: str) -> bool:
        """Whether sysfs has the function."""
        return bool(sysfs.listing(device_path(layout.config.host.sysfs_root, key)))

    def check(self, case: CheckInput, key: str) -> State:
        """Check that the function is no vGPU, can become one of its type, and is used by nothing else."""
        path = device_path(case.root, key)
        self.offered(case, key)
        now = _current(case, key)
        if now != NONE:
            raise VgpuExistsError(
                f"virtual function {key} has vGPU type {now} already",
                "no job has set it",
                "run: vhpc reconcile",
            )
        preflight.check_allowed(case, path, key)
        group = preflight.check_group(case, path, key)
        preflight.check_holders(case, key, group, ANY_DRIVER)
        return {"type": _number(case, key), "group": group, "aer": aer.counts(path)}

    def offered(self, case: CheckInput, key: str) -> None:
        """Check the driver; and the type, unless the function is a vGPU now."""
        if not sysfs.listing(device_path(case.root, key)):
            raise DeviceAbsentError(
                f"virtual function {key} is not there",
                "",
                "create it at each boot with NVIDIA's sriov-manage -e",
            )
        wanted = case.types.get(key)
        if not wanted:
            raise NoVgpuTypeError(
                f"virtual function {key} of an NVIDIA GPU has no vGPU type",
                "the GPU map names none",
                "write vgpu=TYPE behind its address",
            )
        now = _current(case, key)
        if not now:
            raise NoVgpuDriverError(
                f"virtual function {key} cannot become a vGPU",
                f"{bound_to(case.root, key) or 'no driver'} is bound to it, and it has no current_vgpu_type",
                "load NVIDIA's vGPU driver for Linux 6.8 or later; older ones have mdev=TYPE instead",
            )
        if now == NONE:
            _number(case, key)

    def prepare(self, layout: Layout, device: PassthroughDevice, state: State) -> None:
        """Write the type, and read it back."""
        root, timeout_s = layout.config.host.sysfs_root, layout.config.devices.timeout_s
        key, number = device.key, str(state["type"])
        try:
            _set(root, key, number, timeout_s)
        except OSError as err:
            raise NodeError(
                f"virtual function {key} cannot become a vGPU of type {number}",
                f"{err.filename}: {os.strerror(err.errno or 0)}",
                "see dmesg",
            ) from err
        now = current(root, key, timeout_s)
        if now != number:
            raise NodeError(
                f"virtual function {key} has vGPU type {now or 'none'}", f"{number} was written", "see dmesg"
            )

    def idle(self, layout: Layout) -> Iterable[str]:
        """Virtual functions that the GPU map gives a type."""
        return list(gpumap.types(Path(layout.config.placement.gpu_map), gpumap.VGPU))

    def why_not_parked(self, layout: Layout, key: str) -> str:
        """The type that it has; empty if it cannot be read."""
        try:
            now = current(layout.config.host.sysfs_root, key, layout.config.devices.timeout_s)
        except (VhpcError, OSError):
            return ""
        return "" if now in ("", NONE) else f"it has vGPU type {now}"

    def park(self, layout: Layout, key: str) -> None:
        """End the vGPU."""
        self._end(layout, key)

    def release(self, layout: Layout, key: str, state: State, host: HostState) -> None:
        """End the vGPU: the driver takes back its memory."""
        root, config = layout.config.host.sysfs_root, layout.config.devices
        if current(root, key, config.timeout_s) in ("", NONE):
            return  # nothing was changed yet, all was undone, or the driver has ended and with it all vGPUs
        case = CheckInput(root, config, frozenset((key,)), {}, host.proc, host.dev)
        check_closed(case, key, int(state["group"]), ANY_DRIVER)
        errors = aer.risen(state["aer"], aer.counts(device_path(root, key)))
        if errors:
            raise NotCleanError(f"device {key} has reported PCI Express errors during the job", errors)
        self._end(layout, key)

    def clear(self, case: CheckInput, layout: Layout, key: str, state: State) -> None:  # noqa: ARG002 - key says all
        """End the vGPU, and do the checks."""
        preflight.check_holders(
            case, key, preflight.check_group(case, device_path(case.root, key), key), ANY_DRIVER
        )
        self._end(layout, key)
        if key in case.types:
            self.offered(case, key)

    def _end(self, layout: Layout, key: str) -> None:
        root, timeout_s = layout.config.host.sysfs_root, layout.config.devices.timeout_s
        if current(root, key, timeout_s) in ("", NONE):
            return
        _set(root, key, NONE, timeout_s)
        now = current(root, key, timeout_s)
        if now != NONE:
            raise NotCleanError(f"virtual function {key} still has vGPU type {now}", "0 was written")


def _current(case: CheckInput, key: str) -> str:
    try:
        return current(case.root, key, case.config.timeout_s)
    except OSError as err:
        raise NoVgpuDriverError(
            f"the vGPU type of {key} cannot be read", str(err.strerror), "see dmesg"
        ) from err


def _set(root: str, address: str, number: str, timeout_s: float) -> None:
    attribute.write_attribute(f"{_folder(root, address)}/current_vgpu_type", number, timeout_s)


def _number(case: CheckInput, key: str) -> str:
    """The number of the type that the GPU map gives a function by number or name; DeviceError if none."""
    wanted = case.types[key]
    try:
        found = creatable(case.root, key, case.config.timeout_s)
    except OSError as err:
        raise NoVgpuTypeError(f"the vGPU types of {key} cannot be read", str(err.strerror)) from err
    for one in found:
        if wanted in (one.number, one.name):
            return one.number
    there = ", ".join(one.name for one in found)
    raise NoVgpuTypeError(
        f"virtual function {key} cannot become a vGPU of type {wanted}",
        f"creatable now: {there}" if there else "no type is creatable now",
        "other vGPUs use the GPU's memory, its GPU instances are missing, or the GPU map is wrong",
    )


def _folder(root: str, address: str) -> str:
    return f"{device_path(root, address)}/nvidia"
