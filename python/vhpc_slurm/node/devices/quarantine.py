# SPDX-License-Identifier: Apache-2.0
"""Devices that failed a check: recorded on disk, given to no job until a check has passed.

One file per device, written before the generation that held the device releases it.
"""
# Decision: A device in quarantine belongs to no job

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from vhpc_slurm import files
from vhpc_slurm.errors import UNDECODABLE, NodeError, TeardownError
from vhpc_slurm.node.host.pci import ADDRESS
from vhpc_slurm.node.store.layout import Layout


class QuarantineRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A device in quarantine.

    Attributes:
        address: its PCI address.
        role: ``gpu`` or ``vf``.
        reason: one line.
        since: seconds since the epoch.
        generation: the generation whose guest had it last; empty for none.
        driver: the driver it was bound to before, and will be again; empty for none.
        override: its ``driver_override`` before; empty for none.
    """

    address: str
    role: str
    reason: str
    since: float
    generation: str = ""
    driver: str = ""
    override: str = ""


class QuarantinedError(TeardownError):
    """Devices were put into quarantine; nothing else is left of their job.

    Attributes:
        records: their records.
    """

    def __init__(self, records: Sequence[QuarantineRecord]) -> None:
        super().__init__(
            f"quarantined: {', '.join(record.address for record in records)}",
            "; ".join(record.reason for record in records),
            f"vhpc devices clear {records[0].address}",
        )
        self.records = tuple(records)


def put(layout: Layout, record: QuarantineRecord) -> None:
    """Record a device durably.  An existing record keeps its first reason.

    Raises:
        OSError: it cannot be written.
    """
    path = _path(layout, record.address)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.exists():
        return
    files.replace(path, msgspec.json.encode(record))


def remove(layout: Layout, address: str) -> None:
    """Remove a device from quarantine."""
    with contextlib.suppress(FileNotFoundError):
        _path(layout, address).unlink()
        files.sync_folder(layout.quarantine)


def read_records(layout: Layout) -> tuple[QuarantineRecord, ...]:
    """All records, by address.

    Raises:
        NodeError: a record cannot be read.
    """
    found = []
    try:
        names = sorted(os.listdir(layout.quarantine))  # noqa: PTH208 - names alone
    except FileNotFoundError:
        return ()
    for name in names:
        address = name.removesuffix(".json")
        if address == name or not ADDRESS.fullmatch(address):
            continue
        path = layout.quarantine / name
        try:
            found.append(msgspec.json.decode(path.read_bytes(), type=QuarantineRecord))
        except (OSError, msgspec.ValidationError, *UNDECODABLE) as err:
            raise NodeError(f"cannot read {path}", str(err), f"vhpc devices clear {address}") from err
    return tuple(found)


def record(
    address: str, role: str, reason: str, *, generation: str = "", driver: str = "", override: str = ""
) -> QuarantineRecord:
    """A record with the current time."""
    return QuarantineRecord(
        address=address,
        role=role,
        reason=" ".join(reason.split()),
        since=round(time.time(), 3),
        generation=generation,
        driver=driver,
        override=override,
    )


def _path(layout: Layout, address: str) -> Path:
    if not ADDRESS.fullmatch(address):
        raise NodeError(f"{address!r} is not a PCI address")
    return layout.quarantine / f"{address}.json"
