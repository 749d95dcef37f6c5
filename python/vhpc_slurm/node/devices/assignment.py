# SPDX-License-Identifier: Apache-2.0
"""Device assignment: devices are checked and bound, and released clean or quarantined.

A device that fails any check is put into quarantine instead of being released:
it stays bound to vfio-pci, so that no host driver uses it, and no plan contains
it until ``vhpc devices clear`` has checked it again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import field

from vhpc_slurm.errors import NodeError, TeardownError, UserError, VhpcError
from vhpc_slurm.hardware import GPU, VF, NodeDevices, PassthroughDevice, VfIdentity
from vhpc_slurm.node.devices import aer, gpumap, preflight, quarantine, scrub, vf, vf_drivers, vfio
from vhpc_slurm.node.devices.preflight import VFIO, DeviceError
from vhpc_slurm.node.host import attribute, sysfs
from vhpc_slurm.node.store.journal import Entry
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.record import Record


class UnfitError(DeviceError):
    """Virtual functions cannot be assigned now; they were not changed.

    Attributes:
        records: those that were quarantined for this reason.
        busy: addresses of those that are in use on the host, or whose IOMMU group is.
    """

    def __init__(self, records: Sequence[quarantine.QuarantineRecord], busy: Mapping[str, str]) -> None:
        kinds = [("quarantined", [record.address for record in records]), ("in use", [*busy])]
        super().__init__(
            "; ".join(f"{kind}: {', '.join(addresses)}" for kind, addresses in kinds if addresses),
            "; ".join([*(record.reason for record in records), *busy.values()]),
            f"vhpc devices clear {records[0].address}" if records else "",
        )
        self.records, self.busy = tuple(records), frozenset(busy)


class HostState(Record, frozen=True):
    """Paths of the node's files, and the holders of devices; tests use other values."""

    held: Mapping[str, str] = field(default_factory=dict)
    proc: Path = Path("/proc")
    dev: str = "/dev"


def handed_out(layout: Layout) -> NodeDevices:
    """Devices of this node that guests may get, according to the site's settings and the quarantine.

    Raises:
        NodeError: the GPU map or a record of the quarantine cannot be read.
    """
    gpus = gpumap.read_gpu_map(Path(layout.config.placement.gpu_map))
    return NodeDevices(gpus, None, tuple(record.address for record in quarantine.read_records(layout)))


def bind(
    layout: Layout, generation: str, entry: Entry, device: PassthroughDevice, before: preflight.Before
) -> None:
    """Bind a device to vfio-pci, and give a virtual function its identity; the journal has its entry.

    Raises:
        QuarantinedError: it got stuck during the change.
        NodeError: the kernel refused.
    """
    root, timeout_s = layout.config.host.sysfs_root, layout.config.devices.timeout_s
    try:
        vfio.bind(root, device.address, before, timeout_s)
        if device.role == VF:
            # after its driver is unbound, which keeps old values; before the guest's driver reads them
            vf.configure(vf_drivers.find(root, device.address, timeout_s), device.address, _identity(device))
    except attribute.StuckError as err:
        raise _quarantine(layout, generation, entry, err.line()) from err


def _identity(device: PassthroughDevice) -> VfIdentity:
    if device.identity is None:
        raise NodeError(
            f"virtual function {device.address} has no identity in the plan",
            "without one its guest could be in another job's partition",
            "report this as a bug of vhpc",
        )
    return device.identity


def check(layout: Layout, devices: Sequence[PassthroughDevice], host: HostState) -> list[preflight.Before]:
    """Check all devices of a job before the first one is changed.

    Slurm chose the GPUs, so a failed check of one is the node's fault.  Slurm
    only counts virtual functions: one that fails its own check is quarantined, a
    busy one is skipped, and another may take its place.  A check that would fail
    for all of them quarantines none.

    Raises:
        UnfitError: virtual functions cannot be assigned; others may serve.
        DeviceError: another device cannot be assigned.
    """
    case = preflight.CheckInput(
        root=layout.config.host.sysfs_root,
        config=layout.config.devices,
        mine=frozenset(device.address for device in devices),
        held=host.held,
        quarantined=frozenset(record.address for record in quarantine.read_records(layout)),
        proc=host.proc,
        dev=host.dev,
    )
    found: list[preflight.Before] = []
    unfit: list[quarantine.QuarantineRecord] = []
    busy: dict[str, str] = {}
    for device in devices:
        try:
            found.append(preflight.check(case, device.address, device.role))
        except (DeviceError, attribute.StuckError) as err:
            if device.role != VF or isinstance(err, preflight.NODE_WIDE):
                raise
            if isinstance(err, preflight.PASSING):
                busy[device.address] = err.line()
            else:
                unfit.append(quarantine.record(device.address, VF, err.line()))
    for record in unfit:
        quarantine.put(layout, record)
    if unfit or busy:
        raise UnfitError(unfit, busy)
    return found


def release(layout: Layout, generation: str, entry: Entry, host: HostState | None = None) -> None:
    """Release a device: reset, verify and clear it, and bind its former driver.

    Takes at most ``devices.timeout_s`` before and again after the clearing, and
    ``devices.scrub_timeout_s`` for it.  Idempotent, also for a device that was announced but not changed.

    Raises:
        QuarantinedError: a check failed; it is in quarantine now.
        TeardownError: a process still has it open.
    """
    address, data = str(entry.data["address"]), entry.data
    root, config = layout.config.host.sysfs_root, layout.config.devices
    path = preflight.device_path(root, address)
    there = bool(sysfs.listing(path))
    if data["role"] == VF and there:
        _park_released(layout, generation, entry)
    if any(record.address == address for record in quarantine.read_records(layout)):
        return
    if not there:
        raise _quarantine(layout, generation, entry, "it no longer exists")
    try:
        before = attribute.Until(config.timeout_s)
        driver, now = preflight.bound_to(root, address), preflight.override(root, address, before)
        if data["driver"] != VFIO and (driver, now) == (data["driver"], data["override"]):
            return  # it was not changed yet, or everything was undone
        _see_unused(root, layout, entry, driver, host or HostState())
        errors = aer.risen(data.get("aer", {}), aer.counts(path))  # before the reset, which may cause some
        if errors:
            raise vfio.NotCleanError(
                f"device {address} has reported PCI Express errors during the job", errors
            )
        if driver in ("", VFIO):
            vfio.reset(root, address, before)
            if data["role"] == GPU:
                scrub.scrub(config, address, int(sysfs.text_or_empty(f"{path}/vendor"), 16))
        methods = data["methods"]
        vfio.give_back(
            root,
            address,
            data["driver"],
            data["override"],
            None if methods is None else tuple(methods),
            attribute.Until(config.timeout_s),
        )
    except (vfio.NotCleanError, attribute.StuckError) as err:
        raise _quarantine(layout, generation, entry, err.line()) from err
    except OSError as err:
        raise _quarantine(layout, generation, entry, f"{err.filename}: {err.strerror}") from err


def _park_released(layout: Layout, generation: str, entry: Entry) -> None:
    """Disconnect a virtual function from its network.

    If it may still be in the job's partition, it is quarantined and also stays
    in the journal, so that no other job gets the partition key.

    Raises:
        TeardownError: it may still be connected.
    """
    address = str(entry.data["address"])
    try:
        park(layout, address)
    except (VhpcError, OSError) as err:
        line = err.line() if isinstance(err, VhpcError) else str(err)
        _quarantine(layout, generation, entry, line)
        raise TeardownError(f"virtual function {address} may still be on its network", line) from err


def park(layout: Layout, address: str) -> None:
    """Disconnect a virtual function from its network, and reset its identity.

    Raises:
        ParkError: it may still have the identity of a job.
        NoVfDriverError: its driver has no interface for it.
    """
    timeout_s = layout.config.devices.timeout_s
    vf.park(vf_drivers.find(layout.config.host.sysfs_root, address, timeout_s), address)


def why_not_parked(layout: Layout, address: str) -> str:
    """Why an unassigned function is not parked; empty if it is parked or cannot be read."""
    timeout_s = layout.config.devices.timeout_s
    try:
        return vf_drivers.find(layout.config.host.sysfs_root, address, timeout_s).why_not_parked()
    except (VhpcError, OSError):
        return ""


def park_orphan(layout: Layout, address: str) -> None:
    """Park a virtual function that no job holds; quarantine it if that fails.

    Raises:
        TeardownError: it cannot be parked.
    """
    try:
        park(layout, address)
    except (VhpcError, OSError) as err:
        line = err.line() if isinstance(err, VhpcError) else str(err)
        quarantine.put(layout, quarantine.record(address, VF, line))
        raise TeardownError(f"virtual function {address} may still be on its network", line) from err


def _see_unused(root: str, layout: Layout, entry: Entry, driver: str, host: HostState) -> None:
    address = str(entry.data["address"])
    case = preflight.CheckInput(
        root, layout.config.devices, frozenset((address,)), {}, frozenset(), host.proc, host.dev
    )
    try:
        preflight.check_holders(case, address, int(entry.data["group"]), driver)
    except DeviceError as err:
        raise TeardownError(f"device {address} cannot be released", err.line()) from err


def _quarantine(layout: Layout, generation: str, entry: Entry, reason: str) -> quarantine.QuarantinedError:
    """Put a device into quarantine: first on disk, then in an error."""
    data = entry.data
    record = quarantine.record(
        data["address"],
        data["role"],
        reason,
        generation=generation,
        driver=data["driver"],
        override=data["override"],
    )
    quarantine.put(layout, record)
    return quarantine.QuarantinedError([record])


def clear(layout: Layout, address: str, held: Mapping[str, str], host: HostState | None = None) -> None:
    """Check a device in quarantine as after a guest; if all checks pass, release it.

    Raises:
        UserError: it is not in quarantine.
        TeardownError: a check failed; it stays in quarantine.
    """
    records = {record.address: record for record in quarantine.read_records(layout)}
    if address not in records:
        raise UserError(f"device {address} is not in quarantine", "", "see: vhpc devices")
    if address in held:
        raise TeardownError(
            f"device {address} is held by a guest of {held[address]}", "", "end that job first"
        )
    record = records[address]
    root, config = layout.config.host.sysfs_root, layout.config.devices
    path = preflight.device_path(root, address)
    if not sysfs.listing(path):
        raise TeardownError(f"device {address} is not there", "", "compare with lspci -D")
    case = preflight.CheckInput(
        root,
        config,
        frozenset((address,)),
        held,
        frozenset(),
        (host or HostState()).proc,
        (host or HostState()).dev,
    )
    driver = preflight.bound_to(root, address)
    try:
        before = preflight.check(case, address, record.role)
        if record.role == VF:
            park(layout, address)
        if driver in ("", VFIO):
            vfio.reset(root, address, config.timeout_s)
            if record.role == GPU:
                scrub.scrub(config, address, int(sysfs.text_or_empty(f"{path}/vendor"), 16))
        vfio.give_back(root, address, record.driver, record.override, before.methods, config.timeout_s)
    except OSError as err:
        raise TeardownError(
            f"device {address} stays in quarantine", f"{err.filename}: {err.strerror}"
        ) from err
    except (NodeError, TeardownError) as err:
        raise TeardownError(f"device {address} stays in quarantine", err.line()) from err
    quarantine.remove(layout, address)
