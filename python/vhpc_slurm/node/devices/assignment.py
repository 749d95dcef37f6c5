# SPDX-License-Identifier: Apache-2.0
"""Device assignment: devices are checked and prepared, and released clean or quarantined.

The verbs of a device are those of its class.  A device that fails any check is
put into quarantine instead of being released: it stays as it is, so that no
host driver uses it, and no plan contains it until ``vhpc devices clear`` has
checked it again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vhpc_slurm.device import NodeDevices, PassthroughDevice
from vhpc_slurm.errors import NodeError, TeardownError, UserError, VhpcError
from vhpc_slurm.node.devices import classes, gpumap, preflight, quarantine
from vhpc_slurm.node.devices.device_class import DeviceClass, HostState, NotCleanError, State
from vhpc_slurm.node.devices.preflight import CheckInput, DeviceError
from vhpc_slurm.node.host import attribute, pcie
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.record import Record


class UnfitError(DeviceError):
    """Devices that Slurm only counts cannot be assigned now; they were not changed.

    Attributes:
        records: those that were quarantined for this reason.
        busy: keys of those that are in use on the host, or whose IOMMU group is.
    """

    def __init__(self, records: Sequence[quarantine.QuarantineRecord], busy: Mapping[str, str]) -> None:
        kinds = [("quarantined", [record.key for record in records]), ("in use", [*busy])]
        super().__init__(
            "; ".join(f"{kind}: {', '.join(keys)}" for kind, keys in kinds if keys),
            "; ".join([*(record.reason for record in records), *busy.values()]),
            f"vhpc devices clear {records[0].key}" if records else "",
        )
        self.records, self.busy = tuple(records), frozenset(busy)


def handed_out(layout: Layout) -> NodeDevices:
    """Devices of this node that guests may get, according to the site's settings and the quarantine.

    Raises:
        NodeError: the GPU map or a record of the quarantine cannot be read.
    """
    gpus = gpumap.read_gpu_map(Path(layout.config.placement.gpu_map))
    return NodeDevices(gpus, tuple(quarantined(layout)), classes.parents(layout))


def quarantined(layout: Layout) -> dict[str, quarantine.QuarantineRecord]:
    """Records of the quarantine by key; NodeError if one cannot be read."""
    return {record.key: record for record in quarantine.read_records(layout)}


class HeldDevice(Record, frozen=True):
    """A device's entry in the journal: its key, its class, and what its class needs to restore it."""

    device: str
    device_class: str
    state: State


def prepare(layout: Layout, generation: str, held: HeldDevice, device: PassthroughDevice) -> None:
    """Make a device ready for its guest; the journal has its entry.

    Raises:
        QuarantinedError: it got stuck during the change.
        NodeError: the kernel refused.
    """
    try:
        classes.of(device.device_class).prepare(layout, device, held.state)
    except attribute.StuckError as err:
        raise _quarantine(layout, generation, held, err.line()) from err


def check(layout: Layout, devices: Sequence[PassthroughDevice], host: HostState) -> list[State]:
    """Check all devices of a job before the first one is changed.

    Slurm chose the devices with an index, so a failed check of one is the node's
    fault.  Slurm only counts the others: one that fails its own check is
    quarantined, a busy one is skipped, and another may take its place.  A check
    that would fail for all of them quarantines none.

    Raises:
        UnfitError: counted devices cannot be assigned; others may serve.
        DeviceError: another device cannot be assigned.
    """
    known = quarantined(layout)
    case = case_of(layout, [device.key for device in devices], host.held, host)
    found: list[State] = []
    unfit: list[quarantine.QuarantineRecord] = []
    busy: dict[str, str] = {}
    for device in devices:
        try:
            if device.key in known:
                raise preflight.QuarantinedDeviceError(device.key)
            found.append(classes.of(device.device_class).check(case, device.key))
        except (DeviceError, attribute.StuckError) as err:
            if device.traits.indexed or isinstance(err, preflight.NODE_WIDE):
                raise
            if isinstance(err, preflight.PASSING):
                busy[device.key] = err.line()
            else:
                unfit.append(quarantine.record(device.key, device.device_class, err.line()))
    for record in unfit:
        quarantine.put(layout, record)
    if unfit or busy:
        raise UnfitError(unfit, busy)
    return found


def case_of(layout: Layout, mine: Sequence[str], held: Mapping[str, str], host: HostState) -> CheckInput:
    """Inputs of the checks of a job's devices; NodeError if the GPU map cannot be read."""
    config, types = layout.config, gpumap.types(Path(layout.config.placement.gpu_map))
    root = config.host.sysfs_root
    switches = pcie.Switches(root)
    return CheckInput(root, config.devices, frozenset(mine), held, host.proc, host.dev, types, switches)


def release(layout: Layout, generation: str, held: HeldDevice, host: HostState | None = None) -> None:
    """Release a device: disconnect, reset, verify and clear it, and restore its state.

    Idempotent, also for a device that was announced but not changed.  If it
    cannot be disconnected, it is quarantined and also stays in the journal, so that no
    other job gets the partition key.

    Raises:
        QuarantinedError: a check failed; it is in quarantine now.
        TeardownError: it may still be on its network, or a process still has it open.
    """
    key, state, one = held.device, held.state, classes.of(held.device_class)
    there = one.exists(layout, key)
    if there:
        _idled(layout, one, key, one.disconnect, generation=generation, state=state)
    if key in quarantined(layout):
        return
    if not there:
        raise _quarantine(layout, generation, held, "it no longer exists")
    try:
        one.release(layout, key, state, host or HostState())
    except (NotCleanError, attribute.StuckError) as err:
        raise _quarantine(layout, generation, held, err.line()) from err
    except OSError as err:
        raise _quarantine(layout, generation, held, f"{err.filename}: {err.strerror}") from err


def park(layout: Layout, one: DeviceClass, key: str) -> None:
    """Park a device that no job holds; quarantine it if that fails.

    Raises:
        TeardownError: it cannot be parked.
    """
    _idled(layout, one, key, one.park)


def _idled(
    layout: Layout, one: DeviceClass, key: str, verb: Callable[[Layout, str], None], **known: Any
) -> None:
    try:
        verb(layout, key)
    except (VhpcError, OSError) as err:
        line = err.line() if isinstance(err, VhpcError) else str(err)
        quarantine.put(layout, quarantine.record(key, one.traits.name, line, **known))
        raise TeardownError(f"{one.noun} {key} {one.unparked}", line) from err


def _quarantine(
    layout: Layout, generation: str, held: HeldDevice, reason: str
) -> quarantine.QuarantinedError:
    """Put a device into quarantine: first on disk, then in an error."""
    record = quarantine.record(
        held.device, held.device_class, reason, generation=generation, state=held.state
    )
    quarantine.put(layout, record)
    return quarantine.QuarantinedError([record])


def clear(layout: Layout, key: str, held: Mapping[str, str], host: HostState | None = None) -> None:
    """Check a device in quarantine as after a guest; if all checks pass, release it.

    Raises:
        UserError: it is not in quarantine.
        TeardownError: a check failed; it stays in quarantine.
    """
    record = quarantined(layout).get(key)
    if record is None:
        raise UserError(f"device {key} is not in quarantine", "", "see: vhpc devices")
    if key in held:
        raise TeardownError(f"device {key} is held by a guest of {held[key]}", "", "end that job first")
    one = classes.of(record.device_class)
    if not one.exists(layout, key):
        raise TeardownError(f"device {key} is not there", "", "compare with lspci -D")
    case = case_of(layout, [key], held, host or HostState())
    try:
        one.clear(case, layout, key, record.state)
    except OSError as err:
        raise TeardownError(f"device {key} stays in quarantine", f"{err.filename}: {err.strerror}") from err
    except (NodeError, TeardownError) as err:
        raise TeardownError(f"device {key} stays in quarantine", err.line()) from err
    quarantine.remove(layout, key)
