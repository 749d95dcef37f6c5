# SPDX-License-Identifier: Apache-2.0
# promise: attack.manifest
"""Fuzz what is read from disk: a crash, a full disk or a clumsy hand may have damaged it.

The first line of an input names the reader, the rest is the file.  A reader
may refuse a file in its own way.  Whatever else it raises is a defect, and so
is a file that it has taken and reads differently the next time.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from rig import InternalError, fuzz

from vhpc_slurm import config
from vhpc_slurm.catalog import manifest
from vhpc_slurm.errors import NodeError
from vhpc_slurm.model import Generation
from vhpc_slurm.node.store import outbox, statefile, timeline
from vhpc_slurm.node.store.journal import Journal

_folder = tempfile.TemporaryDirectory(prefix="vhpc-fuzz-")
_HERE = Path(_folder.name)
_GENERATION = Generation(42, 0, "0badcafe")


def _journal(raw: bytes) -> None:
    path = _HERE / f"{_GENERATION}.jsonl"
    path.write_bytes(raw)
    try:
        journal = Journal(_HERE, _GENERATION)
    except NodeError:
        return
    journal.acquire("file", "fuzz:new", path="/x")
    held = journal.held()
    journal.close()
    if held[0].key != "fuzz:new":
        raise InternalError("what was taken last is not released first")
    again = Journal(_HERE, _GENERATION)
    if again.held() != held:
        raise InternalError(f"read once more it holds {again.held()}, not {held}")
    for entry in held:
        again.released(entry.key)
    again.remove()


def _state(raw: bytes) -> None:
    path = _HERE / "state"
    path.write_bytes(raw)
    known = statefile.PLUGIN_KEYS | statefile.HOOK_KEYS
    fields = {key: text for key, text in statefile.read_state(path).items() if key in known}
    statefile.write_state(path, fields, os.getuid())
    first = statefile.read_state(path)
    statefile.write_state(path, first, os.getuid())
    if statefile.read_state(path) != first:
        raise InternalError("what was written is not what is read")


def _timeline(raw: bytes) -> None:
    path = _HERE / "timeline"
    path.write_bytes(raw)
    timeline.read_timeline(path)


def _outbox(raw: bytes) -> None:
    folder = _HERE / "outbox"
    folder.mkdir(exist_ok=True)
    (folder / "42.0.0badcafe.json").write_bytes(raw)
    sent: list[outbox.Acknowledgement] = []
    if outbox.flush(folder, sent.append) or outbox.pending(folder):
        raise InternalError("an acknowledgement that is in the way of all others")
    damaged = folder / "42.0.0badcafe.damaged"
    if damaged.exists() == bool(sent):
        raise InternalError("neither sent nor put aside")
    damaged.unlink(missing_ok=True)


def _manifest(raw: bytes) -> None:
    try:
        whole = manifest.decode_whole(raw)
    except ValueError:
        return
    if manifest.canonical(whole) != raw:
        raise InternalError("other bytes than the canonical ones were accepted")
    if manifest.decode_manifest(raw).schema != manifest.SCHEMA:
        raise InternalError("a manifest of an unknown schema was accepted")


def _config(raw: bytes) -> None:
    path = _HERE / "vhpc.toml"
    path.write_bytes(raw)
    try:
        config.load(path)
    except NodeError:
        return


READERS: dict[bytes, Callable[[bytes], None]] = {
    b"journal": _journal,
    b"state": _state,
    b"timeline": _timeline,
    b"outbox": _outbox,
    b"manifest": _manifest,
    b"config": _config,
}


def _open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def one_input(data: bytes) -> None:
    """Give the file to its reader."""
    name, _, raw = data.partition(b"\n")
    reader = READERS.get(name)
    if reader is None:
        return
    before = _open_files()
    reader(raw)
    if _open_files() > before:
        raise InternalError("a file is left open")


if __name__ == "__main__":
    fuzz(one_input)
