# SPDX-License-Identifier: Apache-2.0
"""The journal: the resources of a generation on this node, written before they are acquired.

One append-only file per generation, one JSON object per line, each line on
disk (fsync) before the action that it announces.  A record has the kind of
resource, its key, and the data for its release; ``released`` marks it as
released.  Crash recovery only releases the unreleased entries, newest first.
A crash in the middle of a write leaves a torn last line; its action never
began, so the line is dropped.

A version of vhpc that writes records which earlier versions would misread raises
FORMAT, and gives such records a field ``v`` with that number.  A new kind of
resource, or new data of a kind that an earlier version need not know for the
release, does not need this.

A full file system takes no resource and holds none back: what cannot be announced is not taken,
and a release that cannot be noted may be repeated, because all releases are idempotent.
"""
# Decision: A full disk of a node takes no resource and keeps none

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from vhpc_slurm import files
from vhpc_slurm.errors import FabricError, NodeError
from vhpc_slurm.model import Generation
from vhpc_slurm.record import Record
from vhpc_slurm.undecodable import UNDECODABLE

log = logging.getLogger("vhpc")

Fields = TypeVar("Fields", bound=Record)
OTHER_VERSION = "install the version that wrote it again, then run: vhpc reconcile"
FORMAT = 1
"""The newest records that this version reads; those of format 1 have no ``v``."""


class Entry(Record, frozen=True):
    """One resource that is or may be held.

    ``data`` is what its release needs; updates extend it (a pid is known only
    after the start).
    """

    key: str
    kind: str
    data: dict[str, Any]

    def read(self, fields: type[Fields]) -> Fields:
        """The data as a record of this class, without what the class lacks.

        Raises:
            NodeError: a field is missing, or of another type.
        """
        try:
            return msgspec.convert(self.data, fields)
        except msgspec.ValidationError as err:
            raise NodeError(
                f"the entry {self.key} of a journal is damaged, or of another version",
                str(err),
                OTHER_VERSION,
            ) from err


class Stopped(Exception):  # noqa: N818 - an event, not an error
    """The job was ended during its preparation: acquire nothing more, release everything."""


class Journal:
    """The journal of one generation on this node.

    Args:
        folder: folder of journals; created with mode 0700 if absent.
        generation: the generation.

    Raises:
        NodeError: the folder or file cannot be written.
        FabricError: their file system is full.
    """

    def __init__(self, folder: Path, generation: Generation) -> None:
        self.generation = generation
        self.path = folder / f"{generation}.jsonl"
        self._held: dict[str, Entry] = {}
        self._stop: Path | None = None
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
            self._fd = os.open(self.path, flags, 0o600)
        except OSError as err:
            raise self._unwritable(err) from err
        try:
            self._replay()
            files.sync_folder(folder)
        except OSError as err:
            self.close()
            raise self._unwritable(err) from err
        except NodeError:
            self.close()
            raise

    def stop_when(self, tombstone: Path) -> None:
        """Make ``acquire`` fail as soon as ``tombstone`` exists."""
        self._stop = tombstone

    def acquire(self, kind: str, key: str, **data: Any) -> Entry:
        """Announce that a resource is about to be acquired; returns when the entry is on disk.

        Raises:
            Stopped: the job has been ended meanwhile.
            NodeError: the journal cannot be written.
            FabricError: its file system is full.
        """
        if self._stop is not None and self._stop.exists():
            raise Stopped(f"generation {self.generation} was ended")
        entry = Entry(key, kind, data)
        self._append({"event": "acquire", "key": key, "kind": kind, "data": data})
        self._held[key] = entry
        return entry

    def announce(self, kind: str, key: str, data: Record) -> Entry:
        """``acquire`` with the fields of a record."""
        return self.acquire(kind, key, **msgspec.to_builtins(data))

    def update(self, key: str, **data: Any) -> None:
        """Add data to a held resource."""
        entry = self._held[key]
        self._append({"event": "update", "key": key, "data": data})
        self._held[key] = Entry(key, entry.kind, {**entry.data, **data})

    def released(self, key: str) -> None:
        """Mark a resource as released; its release was verified."""
        try:
            self._append({"event": "released", "key": key})
        except FabricError as err:
            # Others take it for held until this journal is removed, and its release may be repeated.
            log.warning("the release of %s is not noted: %s", key, err.line())
        self._held.pop(key, None)

    def held(self) -> list[Entry]:
        """Unreleased entries, newest first: the order of their release."""
        return list(reversed(self._held.values()))

    def entry(self, key: str) -> Entry:
        """The data of a held resource; KeyError if it is not held."""
        return self._held[key]

    def close(self) -> None:
        """Close the file; the journal stays."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def remove(self) -> None:
        """Delete the journal of a generation that holds nothing any more."""
        if self._held:
            raise NodeError(f"journal {self.path} still holds {len(self._held)} resources")
        self.close()
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()
        files.sync_folder(self.path.parent)

    def _append(self, record: dict[str, Any]) -> None:
        line = json.dumps({"t": round(time.time(), 3), **record}, separators=(",", ":")) + "\n"
        try:
            self._write(line.encode())
        except OSError as err:
            raise self._unwritable(err) from err

    def _write(self, line: bytes) -> None:
        """Append a whole line or nothing."""
        before = os.fstat(self._fd).st_size
        try:
            files.write(self._fd, line)
            os.fsync(self._fd)
        except OSError:
            os.ftruncate(self._fd, before)
            raise

    def _unwritable(self, err: OSError) -> NodeError | FabricError:
        if files.is_full(err):
            why = err.strerror or str(err)
            hint = f"make space in the file system of {self.path.parent}; the job is tried again"
            return FabricError(f"no room for the journal {self.path}", why, hint)
        return NodeError(f"cannot write the journal {self.path}", str(err), "check the disk")

    def _replay(self) -> None:
        raw = os.pread(self._fd, os.fstat(self._fd).st_size, 0)
        whole = raw.rfind(b"\n") + 1
        if whole != len(raw):
            os.ftruncate(self._fd, whole)
        self._held = _held(self.path, raw[:whole])


def read_entries(folder: Path, generation: Generation) -> list[Entry]:
    """Resources of a generation, oldest first, read without changing its journal; empty without a journal.

    Raises:
        NodeError: the journal cannot be read or is damaged.
    """
    path = folder / f"{generation}.jsonl"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        with os.fdopen(fd, "rb") as lines:
            raw = lines.read()
    except FileNotFoundError:
        return []
    except OSError as err:
        raise NodeError(f"cannot read the journal {path}", str(err)) from err
    return list(_held(path, raw[: raw.rfind(b"\n") + 1]).values())


def _held(path: Path, raw: bytes) -> dict[str, Entry]:
    """Unreleased entries by key, from complete lines of a journal."""
    held: dict[str, Entry] = {}
    for line in raw.splitlines():
        try:
            record = json.loads(line)
            if record.get("v", 1) > FORMAT:
                raise _newer(path, record["v"])
            _apply(held, record)
        except (*UNDECODABLE, KeyError, TypeError, AttributeError) as err:
            raise NodeError(
                f"journal {path} is damaged",
                f"{err!r} in {line[:120]!r}",
                "check the resources in it manually, then move it away",
            ) from err
    return held


def _newer(path: Path, number: object) -> NodeError:
    return NodeError(
        f"journal {path} was written by a newer vhpc",
        f"it has records of format {number}, and this version reads format {FORMAT}",
        "install the version that wrote it again, then run: vhpc reconcile",
    )


def _apply(held: dict[str, Entry], record: dict[str, Any]) -> None:
    event, key = record["event"], record["key"]
    if event == "acquire":
        held[key] = Entry(key, record["kind"], dict(record["data"]))
    elif event == "update":
        held[key] = Entry(key, held[key].kind, {**held[key].data, **record["data"]})
    elif event == "released":
        held.pop(key, None)
    else:
        raise ValueError(f"unknown event {event!r}")


def generations(folder: Path) -> Iterator[Generation]:
    """The generations that have a journal in ``folder``, oldest name first."""
    with contextlib.suppress(FileNotFoundError):
        for path in sorted(folder.iterdir()):
            if path.suffix == ".jsonl":
                with contextlib.suppress(ValueError):
                    yield Generation.parse(path.name.removesuffix(".jsonl"))
