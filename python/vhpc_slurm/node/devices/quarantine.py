# SPDX-License-Identifier: Apache-2.0
"""Devices that failed a check: recorded on disk, given to no job until a check has passed.

One file per device, written before the generation that held the device releases it.
"""
# Decision: A device in quarantine belongs to no job

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from vhpc_slurm import files
from vhpc_slurm.device import is_key
from vhpc_slurm.errors import NodeError, TeardownError
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.undecodable import UNDECODABLE


class QuarantineRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A device in quarantine.

    Attributes:
        key: of the device.
        device_class: name of its class.
        reason: one line.
        since: seconds since the epoch.
        generation: the generation whose guest had it last; empty for none.
        state: what its class will restore, as in the journal; empty if nothing was changed.
    """

    key: str
    device_class: str
    reason: str
    since: float
    generation: str = ""
    state: dict[str, Any] = {}


class QuarantinedError(TeardownError):
    """Devices were put into quarantine; nothing else is left of their job.

    Attributes:
        records: their records.
    """

    def __init__(self, records: Sequence[QuarantineRecord]) -> None:
        super().__init__(
            f"quarantined: {', '.join(record.key for record in records)}",
            "; ".join(record.reason for record in records),
            f"vhpc devices clear {records[0].key}",
        )
        self.records = tuple(records)


def put(layout: Layout, record: QuarantineRecord) -> None:
    """Record a device durably.  An existing record keeps its first reason.

    Raises:
        OSError: it cannot be written.
    """
    path = _path(layout, record.key)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.exists():
        return
    files.replace(path, msgspec.json.encode(record))


def remove(layout: Layout, key: str) -> None:
    """Remove a device from quarantine."""
    with contextlib.suppress(FileNotFoundError):
        _path(layout, key).unlink()
        files.sync_folder(layout.quarantine)


def read_records(layout: Layout) -> tuple[QuarantineRecord, ...]:
    """All records, in the order of their files.

    Raises:
        NodeError: a record cannot be read.
    """
    found = []
    try:
        names = sorted(os.listdir(layout.quarantine))  # noqa: PTH208 - names alone
    except FileNotFoundError:
        return ()
    for name in names:
        key = name.removesuffix(".json")
        if key == name or not is_key(key):
            continue
        path = layout.quarantine / name
        try:
            found.append(msgspec.json.decode(path.read_bytes(), type=QuarantineRecord))
        except (OSError, *UNDECODABLE) as err:
            raise NodeError(f"cannot read {path}", str(err), f"vhpc devices clear {key}") from err
    return tuple(found)


def record(
    key: str, device_class: str, reason: str, *, generation: str = "", state: Mapping[str, Any] | None = None
) -> QuarantineRecord:
    """A record with the current time."""
    return QuarantineRecord(
        key=key,
        device_class=device_class,
        reason=" ".join(reason.split()),
        since=round(time.time(), 3),
        generation=generation,
        state=dict(state or {}),
    )


def _path(layout: Layout, key: str) -> Path:
    if not is_key(key):
        raise NodeError(f"{key!r} is not the key of a device")
    return layout.quarantine / f"{key}.json"
