# SPDX-License-Identifier: Apache-2.0
"""Checks of a function before a guest gets it.  Each check has its own error with a hint.

They read sysfs and procfs again, after the plan was made from the inventory,
and are the last checks before anything is changed.

Sources: Documentation/ABI/testing/sysfs-bus-pci, Documentation/driver-api/vfio.rst (groups and
their viability); the kernel itself checks viability only when a group is opened.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from msgspec import field

from vhpc_slurm.config import Devices
from vhpc_slurm.errors import NodeError
from vhpc_slurm.node.devices import aer
from vhpc_slurm.node.host import attribute, pcie, sysfs
from vhpc_slurm.node.host.pcie import config_space
from vhpc_slurm.record import Record

VFIO = "vfio-pci"
BRIDGE_DRIVERS = frozenset(
    ("pcieport", "pci-stub")
)  # the kernel's own list of harmless drivers, except vfio-pci
AWAKE = frozenset(("", "unknown", "D0", "D1", "D2", "D3hot"))
COMMAND = 4  # offset of the command register in configuration space
HEADER_TYPE = 0x0E  # header type in configuration space; bit 7 says that the slot has more functions


class DeviceError(NodeError):
    """A device of this node cannot be assigned to a guest."""


class DeviceAbsentError(DeviceError):
    """The function does not exist."""


class NotAllowedError(DeviceError):
    """The site does not allow functions of this kind, or no guest may have one."""


class QuarantinedDeviceError(DeviceError):
    """The device is in quarantine."""

    def __init__(self, key: str) -> None:
        super().__init__(f"device {key} is quarantined", "", f"vhpc devices; vhpc devices clear {key}")


class VfsInUseError(DeviceError):
    """The function is a physical one with virtual functions."""


class HostNetworkError(DeviceError):
    """The host uses the function as a network interface."""


class IommuOffError(DeviceError):
    """The function has no IOMMU group, so it could access the host's memory."""


class NotViableError(DeviceError):
    """Another function of its IOMMU group is bound to a host driver."""


class SharedGroupError(DeviceError):
    """Another function of its IOMMU group, or one that it can reach, belongs to a guest of another job."""


class NotIsolatedError(DeviceError):
    """The function and one of the host can reach each other below a switch without the IOMMU."""


class NoResetError(DeviceError):
    """The function has no reset method that the site trusts."""


class AsleepError(DeviceError):
    """The function is powered down and does not wake up."""


class SilentError(DeviceError):
    """The function does not answer."""


class InUseError(DeviceError):
    """A process of the host has the function open."""


class PinnedError(DeviceError):
    """Another program has set the function's driver_override."""


class NoVfioError(DeviceError):
    """The kernel has no vfio-pci."""


NODE_WIDE = (NotAllowedError, IommuOffError, NotIsolatedError, NoVfioError)
"""The cause affects all functions of this kind on the node."""

PASSING = (SharedGroupError, InUseError)
"""The function or its IOMMU group is in use elsewhere; the function itself works."""


class Before(Record, frozen=True):
    """State of a function that is restored after the guest.

    Attributes:
        driver: the driver it was bound to; empty for none.
        override: its ``driver_override``; empty for none.
        methods: its enabled reset methods; None if the kernel does not list them.
        accepted: those that the site trusts.
        group: its IOMMU group.
        aer: PCI Express errors until now.
    """

    driver: str
    override: str
    methods: tuple[str, ...] | None
    accepted: tuple[str, ...]
    group: int
    aer: aer.Counts


class CheckInput(Record, frozen=True):
    """Inputs of the checks besides the device.

    Attributes:
        root: path of sysfs.
        config: the site's settings.
        mine: keys of the same job's devices.
        held: generation by key, of other jobs' devices.
        proc: path of procfs.
        dev: folder of the device files.
        types: parts that devices become according to the GPU map, by key.
        switches: above all of the devices; None for a check of one device.
    """

    root: str
    config: Devices
    mine: frozenset[str]
    held: Mapping[str, str]
    proc: Path = Path("/proc")
    dev: str = "/dev"
    types: Mapping[str, str] = field(default_factory=dict)
    switches: pcie.Switches | None = None


def device_path(root: str, address: str) -> str:
    """Folder of a function."""
    return f"{root}/bus/pci/devices/{address}"


def bound_to(root: str, address: str) -> str:
    """Its driver; empty for none."""
    return sysfs.link(f"{device_path(root, address)}/driver").rpartition("/")[2]


def override(root: str, address: str, timeout_s: float | attribute.Until) -> str:
    """Its ``driver_override``; empty for none.

    Raises:
        StuckError: the device is locked.
        OSError: it cannot be read.
    """
    said = attribute.read_attribute(f"{device_path(root, address)}/driver_override", timeout_s)
    return "" if said == "(null)" else said


def check(case: CheckInput, address: str, *, virtual: bool) -> Before:
    """Do all checks.  With ``virtual``, only a virtual function passes.

    Raises:
        DeviceError: the first failed check; each has its own subclass.
    """
    path = device_path(case.root, address)
    if not sysfs.listing(path):
        raise DeviceAbsentError(
            f"device {address} is not there", f"{path} does not exist", "compare with lspci -D"
        )
    _check_kind(case, path, address, virtual=virtual)
    _check_host(path, address)
    group = check_group(case, path, address)
    methods, accepted = _check_reset(case, path, address)
    _check_alive(path, address, case.config.timeout_s)
    driver = bound_to(case.root, address)
    check_holders(case, address, group, driver)
    pinned = override(case.root, address, case.config.timeout_s)
    if pinned not in ("", VFIO):
        raise PinnedError(
            f"device {address} is pinned to driver {pinned}",
            "its driver_override was not set by vhpc",
            "see driverctl list-overrides",
        )
    if not sysfs.listing(f"{case.root}/bus/pci/drivers/{VFIO}"):
        raise NoVfioError(
            f"device {address} cannot be bound to {VFIO}",
            "the kernel has no such driver",
            "modprobe vfio-pci, and name it in /etc/modules-load.d",
        )
    return Before(driver, pinned, methods, accepted, group, aer.counts(path))


def check_allowed(case: CheckInput, path: str, address: str) -> None:
    """Check that the site allows functions of this kind; NotAllowedError if not."""
    identity = ":".join(
        sysfs.text_or_empty(f"{path}/{name}").removeprefix("0x") for name in ("vendor", "device")
    )
    if case.config.allow and identity not in case.config.allow:
        raise NotAllowedError(
            f"device {address} is a {identity}", "devices.allow does not list it", "see vhpc.toml(5)"
        )


def _check_kind(case: CheckInput, path: str, address: str, *, virtual: bool) -> None:
    check_allowed(case, path, address)
    if virtual and not sysfs.link(f"{path}/physfn"):
        raise NotAllowedError(
            f"device {address} is not a virtual function",
            "guests do not get whole adapters: guest root could change the firmware",
            "run vhpc node-setup, which creates virtual functions",
        )
    header = config_space(path, HEADER_TYPE, 1)
    if header and header[0] != 0xFF and header[0] & 0x7F:
        raise NotAllowedError(f"device {address} is a bridge", f"header type {header[0] & 0x7F}")
    if int(sysfs.text_or_empty(f"{path}/sriov_numvfs") or 0):
        raise VfsInUseError(
            f"device {address} has virtual functions",
            "vfio-pci does not accept a physical function with virtual functions",
            f"echo 0 > {path}/sriov_numvfs",
        )


def _check_host(path: str, address: str) -> None:
    for name in sysfs.listing(f"{path}/net"):
        if sysfs.interface_up(f"{path}/net/{name}"):
            raise HostNetworkError(
                f"device {address} is the host's network interface {name}, which is up",
                "the host would lose it",
                f"ip link set {name} down, or remove it from devices.allow",
            )


def check_group(case: CheckInput, path: str, address: str) -> int:
    """Check that no other holder has a function of its IOMMU group, and return the group.

    Raises:
        IommuOffError, SharedGroupError, NotViableError, NotIsolatedError: a guest may not get it now.
    """
    group = sysfs.link(f"{path}/iommu_group").rpartition("/")[2]
    if not group.isdecimal():
        raise IommuOffError(
            f"device {address} has no IOMMU group",
            "the IOMMU is off: a guest could write to all of the host's memory",
            "boot with intel_iommu=on or amd_iommu=on, and enable it in the firmware",
        )
    for member in sysfs.listing(f"{path}/iommu_group/devices"):
        if member in case.mine:
            continue
        if member in case.held:
            raise SharedGroupError(
                f"device {address} shares IOMMU group {group} with {member}",
                f"which a guest of {case.held[member]} has",
                "put the two into slots that the bridges above them isolate (ACS)",
            )
        driver = bound_to(case.root, member)
        if driver and driver not in BRIDGE_DRIVERS:
            why = (
                "another guest or program may hold it"
                if driver == VFIO
                else "the kernel assigns a group only as a whole"
            )
            hint = f"bind {member} to {VFIO} with the same job, to no driver, or isolate the slots (ACS)"
            kind = SharedGroupError if driver == VFIO else NotViableError
            raise kind(
                f"device {address} shares IOMMU group {group} with {member}, which {driver} has", why, hint
            )
    _check_isolation(case, address)
    return int(group)


def _check_isolation(case: CheckInput, address: str) -> None:
    """Check that no other holder has a device below the same switches that ports do not isolate."""
    switches = case.switches or pcie.Switches(case.root)
    for other, port in switches.unguarded(address).items():
        driver = bound_to(case.root, other)
        idle = other not in case.held and driver in ("", VFIO, *BRIDGE_DRIVERS)
        if other in case.mine or idle:
            continue
        what = f"device {address} is not isolated from {other}: ACS of port {port} is off or missing"
        hint = "remove what turns ACS off (setpci ... ECAP_ACS), or put the two below different switches"
        if other in case.held:
            raise SharedGroupError(what, f"a guest of {case.held[other]} has {other}", hint)
        raise NotIsolatedError(what, f"{driver} of the host has {other}", hint)


def _check_reset(case: CheckInput, path: str, address: str) -> tuple[tuple[str, ...] | None, tuple[str, ...]]:
    said = sysfs.text(f"{path}/reset_method")
    if said is None and "reset" in sysfs.listing(path):
        return None, ()  # before Linux 5.15 the kernel chooses the reset method
    methods = tuple((said or "").split())
    if not methods:
        raise NoResetError(
            f"device {address} cannot be reset",
            "the next guest could read data of the previous one",
            "do not use it for guests",
        )
    accepted = tuple(
        method
        for method in methods
        if method in case.config.reset_methods and (method != "bus" or _alone(case, address))
    )
    if not accepted:
        raise NoResetError(
            f"device {address} can only be reset by {' '.join(methods)}",
            "devices.reset_methods has none of these, or others are on the same bus",
            "see vhpc.toml(5)",
        )
    return methods, accepted


def _alone(case: CheckInput, address: str) -> bool:
    """Whether a reset of its bus affects only functions of this job."""
    bus = address.rpartition(":")[0]
    there = sysfs.listing(f"{case.root}/bus/pci/devices")
    return all(name in case.mine for name in there if name.rpartition(":")[0] == bus)


def _check_alive(path: str, address: str, timeout_s: float) -> None:
    state = sysfs.text_or_empty(f"{path}/power_state")
    if state not in AWAKE:
        with contextlib.suppress(OSError):
            attribute.write_attribute(f"{path}/power/control", "on", timeout_s)
        state = sysfs.text_or_empty(f"{path}/power_state")
    if state not in AWAKE:
        raise AsleepError(
            f"device {address} is in {state}",
            "it does not wake up although power/control is on",
            "power-cycle the node",
        )
    # not its ids: in a virtual function they read ff by design
    if config_space(path, COMMAND, 2) in (b"\xff\xff", b""):
        raise SilentError(
            f"device {address} does not answer", "its configuration space reads ff", "power-cycle the node"
        )


def check_holders(case: CheckInput, address: str, group: int, driver: str) -> None:
    """Check that no process has the device open.

    Raises:
        InUseError: a process has it open.
    """
    nodes = [f"{case.dev}/vfio/{group}"]
    if driver == "nvidia":
        nodes.append(f"{case.dev}/nvidia")
    for pid, name, node in _open_nodes(case.proc, nodes):
        raise InUseError(
            f"device {address} is in use", f"process {pid} ({name}) has {node} open", f"stop {name}"
        )


def _open_nodes(proc: Path, nodes: list[str]) -> Iterator[tuple[int, str, str]]:
    """Processes that have one of these device files open; a name without a final digit means all numbers."""
    for entry in os.scandir(proc):
        if not entry.name.isdigit():
            continue
        try:
            opened = {os.readlink(fd.path) for fd in os.scandir(f"{entry.path}/fd")}  # noqa: PTH115 - all of the host
        except OSError:
            continue  # it has ended
        for target in opened:
            for node in nodes:
                rest = target.removeprefix(node)
                if target == node or (not node[-1].isdigit() and rest != target and rest.isdigit()):
                    yield int(entry.name), sysfs.text_or_empty(f"{entry.path}/comm"), target
