# SPDX-License-Identifier: Apache-2.0
"""A PCI device of a guest: a GPU, a virtual function, or another function that is passed through whole."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial

from vhpc_slurm.errors import VhpcError
from vhpc_slurm.hardware import GPU, VF, PassthroughDevice
from vhpc_slurm.model import Generation
from vhpc_slurm.node import finding
from vhpc_slurm.node.devices import aer, assignment, preflight, quarantine, setup
from vhpc_slurm.node.finding import Kind, NodeFinding
from vhpc_slurm.node.resource import reservations
from vhpc_slurm.node.resource.protocol import Resource, Result
from vhpc_slurm.node.store.journal import Entry, Journal
from vhpc_slurm.node.store.layout import Layout

AT_ONCE = 32  # devices that are released in parallel; the threads only wait


class AssignedDevice(Resource):
    """A PCI device that is bound to vfio-pci for a guest."""

    kind = "device"

    def take(
        self,
        layout: Layout,
        journal: Journal,
        devices: Sequence[PassthroughDevice],
        host: assignment.HostState,
    ) -> None:
        """Bind a job's devices to vfio-pci, and give its virtual functions their identities.

        Args:
            layout: of this node.
            journal: the job's journal.
            devices: of all guests of the job; virtual functions with their identities.
            host: paths, and holders of devices.

        All are checked before the first one is changed.

        Raises:
            UnfitError: virtual functions cannot be assigned; others may serve.
            DeviceError: one cannot be assigned; nothing was changed.
            QuarantinedError: one got stuck during the change.
            NodeError: the kernel refused one.
            Stopped: the job was ended meanwhile.
        """
        checked = assignment.check(layout, devices, host)
        root = layout.config.host.sysfs_root
        for device, before in zip(devices, checked, strict=True):
            entry = journal.acquire(
                self.kind,
                f"{self.kind}:{device.address}",
                address=device.address,
                role=device.role,
                driver=before.driver,
                override=before.override,
                methods=before.methods,
                group=before.group,
                aer=aer.counts(preflight.device_path(root, device.address)),
            )
            assignment.bind(layout, str(journal.generation), entry, device, before)

    def release(self, layout: Layout, generation: Generation, entry: Entry) -> None:
        """Reset, verify and clear a device, and bind its former driver; else it goes into quarantine."""
        assignment.release(layout, str(generation), entry)

    def release_each(
        self, layout: Layout, generation: Generation, entries: Sequence[Entry]
    ) -> Iterator[Result]:
        """Release devices in parallel; yields each with its result, in the order of completion.

        Clearing a GPU's memory takes long, and all GPUs of a large node must be
        clear before Slurm's timeout of the Epilog.
        """

        def clear_lane(lane: list[Entry]) -> list[Result]:
            found: list[Result] = []
            for entry in lane:
                try:
                    self.release(layout, generation, entry)
                except (VhpcError, OSError) as err:
                    found.append((entry, err))
                else:
                    found.append((entry, None))
            return found

        with ThreadPoolExecutor(AT_ONCE) as pool:
            for ended in as_completed([pool.submit(clear_lane, lane) for lane in lanes(entries)]):
                yield from ended.result()

    def disconnect(self, layout: Layout, entries: Iterable[Entry]) -> None:
        """Disconnect a generation's virtual functions from their networks now, while a guest may have them.

        The release repeats it, and quarantines those that are still connected.
        """
        for entry in entries:
            if entry.kind == self.kind and entry.data["role"] == VF:
                with contextlib.suppress(VhpcError, OSError):
                    assignment.park(layout, str(entry.data["address"]))

    def orphans(self, layout: Layout) -> Iterator[NodeFinding]:
        """Virtual functions that are on a network although no generation holds them."""
        try:
            known = {record.address for record in quarantine.read_records(layout)}
            made = [address for address in setup.made(layout) if address not in known]
            held = self._held(layout) if made else set()
        except (
            VhpcError
        ) as err:  # a journal or a record is damaged: it is unknown which generation holds what
            yield finding.of_error(Kind.UNPARKED_FUNCTION, err)
            return
        for address in (one for one in made if one not in held):
            wrong = assignment.why_not_parked(layout, address)
            if wrong:
                what = f"virtual function {address} belongs to no job but is not parked: {wrong}"
                yield NodeFinding(Kind.UNPARKED_FUNCTION, what, partial(self._park_orphan, layout, address))

    def _held(self, layout: Layout) -> set[object]:
        """Addresses that a generation has reserved, or has not released yet."""
        reserved = reservations.Reservations().entries(layout)
        return {address for _, entry in reserved for address in entry.data.get("devices", ())} | {
            entry.data.get("address") for _, entry in self.entries(layout)
        }

    def _park_orphan(self, layout: Layout, address: str) -> None:
        # Prolog reserves devices under the same lock: either it has reserved this one, or it finds it parked.
        with reservations.plan_lock(layout, layout.config.guests.stage_timeout_s):
            if address not in self._held(layout):
                assignment.park_orphan(layout, address)


def lanes(entries: Sequence[Entry]) -> list[list[Entry]]:
    """Devices that are released one after the other: GPUs of one bus, which a bus reset would affect."""
    found: dict[str, list[Entry]] = {}
    for entry in entries:
        address = str(entry.data["address"])
        bus = address.rpartition(":")[0]
        found.setdefault(bus if entry.data["role"] == GPU else address, []).append(entry)
    return list(found.values())
