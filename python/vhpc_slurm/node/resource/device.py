# SPDX-License-Identifier: Apache-2.0
"""A device that is handed to a guest."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial

from vhpc_slurm import record
from vhpc_slurm.device import PassthroughDevice
from vhpc_slurm.errors import NodeError, VhpcError
from vhpc_slurm.model import Generation
from vhpc_slurm.node import finding
from vhpc_slurm.node.devices import assignment, classes
from vhpc_slurm.node.devices.assignment import HeldDevice
from vhpc_slurm.node.devices.device_class import DeviceClass, HostState
from vhpc_slurm.node.devices.quarantine import QuarantineRecord
from vhpc_slurm.node.finding import Kind, NodeFinding
from vhpc_slurm.node.resource import reservations
from vhpc_slurm.node.resource.protocol import Resource, Result
from vhpc_slurm.node.store.journal import Entry, Journal
from vhpc_slurm.node.store.layout import Layout

AT_ONCE = 32  # devices that are released in parallel; the threads only wait


class AssignedDevice(Resource):
    """A device of a guest, prepared and released by its class."""

    kind = "device"

    def take(
        self,
        layout: Layout,
        journal: Journal,
        devices: Sequence[PassthroughDevice],
        host: HostState,
    ) -> None:
        """Prepare a job's devices for its guests.

        Args:
            layout: of this node.
            journal: the job's journal.
            devices: of all guests of the job; networked ones with their identities.
            host: paths, and holders of devices.

        All are checked before the first one is changed.

        Raises:
            UnfitError: counted devices cannot be assigned; others may serve.
            DeviceError: one cannot be assigned; nothing was changed.
            QuarantinedError: one got stuck during the change.
            NodeError: the kernel refused one.
            Stopped: the job was ended meanwhile.
        """
        checked = assignment.check(layout, devices, host)
        for device, state in zip(devices, checked, strict=True):
            held = HeldDevice(device.key, device.device_class, state)
            journal.announce(self.kind, f"{self.kind}:{device.key}", held)
            assignment.prepare(layout, str(journal.generation), held, device)

    def release(self, layout: Layout, generation: Generation, entry: Entry) -> None:
        """Reset, verify and clear a device, and restore its state; else it goes into quarantine."""
        assignment.release(layout, str(generation), entry.read(HeldDevice))

    def release_each(
        self, layout: Layout, generation: Generation, entries: Sequence[Entry]
    ) -> Iterator[Result]:
        """Release devices in parallel; yields each with its result, in the order of completion.

        Clearing a GPU's memory takes long, and all GPUs of a large node must be
        clear before Slurm's timeout of the Epilog.
        """

        def clear_lane(lane: list[Entry]) -> list[Result]:
            return [self.release_one(layout, generation, entry) for entry in lane]

        record.prepare(HeldDevice, QuarantineRecord)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for ended in as_completed([pool.submit(clear_lane, lane) for lane in lanes(entries)]):
                yield from ended.result()

    def disconnect(self, layout: Layout, entries: Iterable[Entry]) -> None:
        """Disconnect a generation's devices from their networks now, while a guest may have them.

        The release repeats it, and quarantines those that are still connected.
        """
        for entry in entries:
            if entry.kind == self.kind:
                with contextlib.suppress(VhpcError, OSError):
                    found = entry.read(HeldDevice)
                    classes.of(found.device_class).disconnect(layout, found.device)

    def orphans(self, layout: Layout) -> Iterator[NodeFinding]:
        """Devices that are not parked although no generation holds them."""
        try:
            known = assignment.quarantined(layout)
            every = [(one, key) for one in classes.CLASSES.values() for key in one.idle(layout)]
            idle = [(one, key) for one, key in every if key not in known]
            held = self._held(layout) if idle else set()
        except (
            VhpcError
        ) as err:  # a journal or a record is damaged: it is unknown which generation holds what
            yield finding.of_error(Kind.UNPARKED_FUNCTION, err)
            return
        for one, key in idle:
            wrong = "" if key in held else one.why_not_parked(layout, key)
            if wrong:
                what = f"{one.noun} {key} belongs to no job but is not parked: {wrong}"
                yield NodeFinding(Kind.UNPARKED_FUNCTION, what, partial(self._park_orphan, layout, one, key))

    def _held(self, layout: Layout) -> set[str]:
        """Keys that a generation has reserved, or has not released yet."""
        reserved = {key for one in reservations.live(layout) for key in one.devices}
        return reserved | {entry.read(HeldDevice).device for _, entry in self.entries(layout)}

    def _park_orphan(self, layout: Layout, one: DeviceClass, key: str) -> None:
        # Prolog reserves devices under the same lock: either it has reserved this one, or it finds it parked.
        with reservations.plan_lock(layout, layout.config.guests.stage_timeout_s):
            if key not in self._held(layout):
                assignment.park(layout, one, key)


def lanes(entries: Sequence[Entry]) -> list[list[Entry]]:
    """Devices that are released one after the other, as their classes say."""
    found: dict[tuple[str, str], list[Entry]] = {}
    for entry in entries:
        lane = ("", entry.key)
        with contextlib.suppress(NodeError):  # its release says why
            held = entry.read(HeldDevice)
            one = classes.CLASSES.get(held.device_class)
            lane = (held.device_class, one.lane(held.device) if one else held.device)
        found.setdefault(lane, []).append(entry)
    return list(found.values())
