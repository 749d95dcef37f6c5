# SPDX-License-Identifier: Apache-2.0
"""The device classes of PCI functions that are bound to vfio-pci: GPUs and virtual functions of adapters."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import msgspec

from vhpc_slurm.device import GpuTraits, PassthroughDevice, VfIdentity, VirtualFunctionTraits
from vhpc_slurm.errors import NodeError, VhpcError
from vhpc_slurm.hardware import PCI_ADDRESS
from vhpc_slurm.node.devices import aer, mig, preflight, scrub, vf, vf_drivers, vfio
from vhpc_slurm.node.devices.device_class import DeviceClass, HostState, NotCleanError, State, check_closed
from vhpc_slurm.node.devices.preflight import VFIO, Before, CheckInput, NotAllowedError, device_path
from vhpc_slurm.node.host import attribute, sysfs
from vhpc_slurm.node.store.layout import Layout


class PciFunctionClass(DeviceClass):
    """PCI functions; a reset restores their state."""

    virtual = False

    def exists(self, layout: Layout, key: str) -> bool:
        """Whether sysfs has the function."""
        return bool(sysfs.listing(device_path(layout.config.host.sysfs_root, key)))

    def check(self, case: CheckInput, key: str) -> State:
        """Do the checks of ``preflight``."""
        self.offered(case, key)
        found: State = msgspec.to_builtins(preflight.check(case, key, virtual=self.virtual))
        return found

    def offered(self, case: CheckInput, key: str) -> None:
        """A guest that should get a part of a function must not get all of it."""
        if key in case.types:
            raise NotAllowedError(
                f"device {key} is not a virtual function of an NVIDIA GPU",
                f"the GPU map says that it becomes {case.types[key]}",
                "correct the GPU map",
            )

    def prepare(self, layout: Layout, device: PassthroughDevice, state: State) -> None:
        """Bind the function to vfio-pci."""
        timeout_s = layout.config.devices.timeout_s
        vfio.bind(layout.config.host.sysfs_root, device.key, msgspec.convert(state, Before), timeout_s)

    def release(self, layout: Layout, key: str, state: State, host: HostState) -> None:
        """Takes at most ``devices.timeout_s`` before and again after the clearing of the memory."""
        root, config = layout.config.host.sysfs_root, layout.config.devices
        before = msgspec.convert(state, Before)
        until = attribute.Until(config.timeout_s)
        driver, now = preflight.bound_to(root, key), preflight.override(root, key, until)
        if before.driver != VFIO and (driver, now) == (before.driver, before.override):
            return  # it was not changed yet, or everything was undone
        case = CheckInput(root, config, frozenset((key,)), {}, host.proc, host.dev)
        check_closed(case, key, before.group, driver)
        # before the reset, which may cause some
        errors = aer.risen(before.aer, aer.counts(device_path(root, key)))
        if errors:
            raise NotCleanError(f"device {key} has reported PCI Express errors during the job", errors)
        if driver in ("", VFIO):
            self.reset(layout, key, until)
        vfio.give_back(
            root, key, before.driver, before.override, before.methods, attribute.Until(config.timeout_s)
        )

    def clear(self, case: CheckInput, layout: Layout, key: str, state: State) -> None:
        """Check, disconnect, reset and clear the function, and bind its former driver."""
        driver, timeout_s = preflight.bound_to(case.root, key), case.config.timeout_s
        methods = preflight.check(case, key, virtual=self.virtual).methods
        self.disconnect(layout, key)
        if driver in ("", VFIO):
            self.reset(layout, key, timeout_s)
        vfio.give_back(case.root, key, state.get("driver", ""), state.get("override", ""), methods, timeout_s)

    def reset(self, layout: Layout, key: str, timeout_s: float | attribute.Until) -> None:
        """Reset the function, and verify it; raises as ``vfio.reset``."""
        vfio.reset(layout.config.host.sysfs_root, key, timeout_s)


class Gpu(PciFunctionClass):
    """GPUs, and other PCI functions in the GPU map."""

    traits = GpuTraits()

    def reset(self, layout: Layout, key: str, timeout_s: float | attribute.Until) -> None:
        """Also end MIG mode, and clear the memory."""
        root, config = layout.config.host.sysfs_root, layout.config.devices
        reset = partial(super().reset, layout, key, timeout_s)
        reset()
        until = attribute.Until(config.scrub_timeout_s)
        mig.end(root, key, until, reset)
        path = device_path(root, key)
        vendor, device = (int(sysfs.text_or_empty(f"{path}/{name}"), 16) for name in ("vendor", "device"))
        scrub.scrub(config, key, vendor, device, until)

    def lane(self, key: str) -> str:
        """The bus: a bus reset affects all functions on it."""
        return key.rpartition(":")[0]


class VirtualFunction(PciFunctionClass):
    """Virtual functions of network adapters; parked ones are in no network."""

    traits = VirtualFunctionTraits()
    noun = "virtual function"
    unparked = "may still be on its network"
    virtual = True

    def prepare(self, layout: Layout, device: PassthroughDevice, state: State) -> None:
        """Bind the function to vfio-pci, and give it its identity."""
        super().prepare(layout, device, state)
        # after its driver is unbound, which keeps old values; before the guest's driver reads them
        vf.configure(_driver(layout, device.key), device.key, _identity(device))

    def disconnect(self, layout: Layout, key: str) -> None:
        """Disconnect the function from its network, and reset its identity.

        Raises:
            ParkError: it may still have the identity of a job.
            NoVfDriverError: its driver has no interface for it.
        """
        vf.park(_driver(layout, key), key)

    def idle(self, layout: Layout) -> Iterable[str]:
        """Existing virtual functions of the adapters in ``devices.virtual_functions``."""
        for wish in layout.config.devices.virtual_functions:
            pf = wish.partition("=")[0]
            if PCI_ADDRESS.fullmatch(pf):
                yield from virtual_functions(device_path(layout.config.host.sysfs_root, pf))

    def why_not_parked(self, layout: Layout, key: str) -> str:
        """What is still set; empty if it is parked or cannot be read."""
        try:
            return _driver(layout, key).why_not_parked()
        except (VhpcError, OSError):
            return ""


def virtual_functions(path: str) -> list[str]:
    """Addresses of a physical function's virtual functions, by number."""
    return [sysfs.link(link).rpartition("/")[2] for _, link in sysfs.numbered(path, "virtfn")]


def _driver(layout: Layout, address: str) -> vf.VfDriver:
    return vf_drivers.find(layout.config.host.sysfs_root, address, layout.config.devices.timeout_s)


def _identity(device: PassthroughDevice) -> VfIdentity:
    if device.identity is None:
        raise NodeError(
            f"virtual function {device.key} has no identity in the plan",
            "without one its guest could be in another job's partition",
            "report this as a bug of vhpc",
        )
    return device.identity
