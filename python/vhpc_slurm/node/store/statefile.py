# SPDX-License-Identifier: Apache-2.0
"""The state file of a job on a node, which the SPANK plugin reads when a task starts.

``key=value`` lines, writable only by root, replaced by rename so that a reader
sees one version or the next.  If a user's mistake is found before the first
task runs, the plugin prints it from here to the task's stderr.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import time
from pathlib import Path

from vhpc_slurm import files
from vhpc_slurm.errors import FabricError, NodeError
from vhpc_slurm.model import Generation

LIMIT = 4000
"""Maximum bytes of a value; longer values are truncated."""
VERSION = "1"
PLUGIN_KEYS = frozenset(
    {
        "version", "job", "restart", "generation", "status", "message", "image", "batch", "socket",
        "commands", "command_path", "cpus", "gpus", "guests", "components", "warning", "attach",
    }
)  # fmt: skip
"""Keys that the SPANK plugin reads: key_names of spank_plugin/state.c."""
HOOK_KEYS = frozenset({"digest", "kind", "alarm", "since", "console"})
"""Keys that only the hooks and the vhpc command read."""
USER_OBJ, USER, GROUP_OBJ, MASK, OTHER = 0x01, 0x02, 0x04, 0x10, 0x20
"""Tags of entries of an access control list."""


def write_state(path: Path, fields: dict[str, str], reader: int) -> None:
    """Replace the state file; it says since when it is so (``age``).

    Line breaks and other control characters in values become spaces: the
    reader is a small C parser and the text is shown on a terminal.

    Args:
        path: the file.
        fields: its content.
        reader: uid of the job's user; only this user and root may read it.

    Raises:
        ValueError: a key is not in ``PLUGIN_KEYS`` and not in ``HOOK_KEYS``.
        NodeError: it cannot be written.
        FabricError: its file system is full.
    """
    if unknown := fields.keys() - PLUGIN_KEYS - HOOK_KEYS:
        raise ValueError(f"keys that no reader of a state file knows: {sorted(unknown)}")
    lines = [f"version={VERSION}"]
    for key, value in ({"since": f"{uptime():.0f}"} | fields).items():
        clean = "".join(c if c.isprintable() else " " for c in value)
        lines.append(f"{key}={clean.encode()[:LIMIT].decode(errors='ignore')}")
    part = path.with_name(".state.part")
    try:
        with contextlib.suppress(FileNotFoundError):
            part.unlink()
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w", encoding="utf-8") as out:
            _let_read(fd, reader)
            out.write("\n".join(lines) + "\n")
        part.rename(path)
    except OSError as err:
        part.unlink(missing_ok=True)
        if files.is_full(err):
            raise FabricError(f"no room for {path}", err.strerror or str(err)) from err
        raise NodeError(f"cannot write {path}", str(err)) from err


def _let_read(fd: int, uid: int) -> None:
    """Let one user read a file that only root may write: acl(5), format of linux/posix_acl_xattr.h.

    On a file system without access control lists the file becomes readable to
    all, because there is no other way to give access to exactly one user.
    """
    none = 0xFFFFFFFF
    entries = ((USER_OBJ, 6, none), (USER, 4, uid), (GROUP_OBJ, 0, none), (MASK, 4, none), (OTHER, 0, none))
    packed = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
    try:
        os.setxattr(fd, "system.posix_acl_access", packed)
    except OSError as err:
        if err.errno != errno.EOPNOTSUPP:
            raise
        os.fchmod(fd, 0o644)


def read_state(path: Path) -> dict[str, str]:
    """The fields of a state file; empty if it does not exist; invalid UTF-8 becomes U+FFFD."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return {}
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)


def gpu_indexes(path: Path) -> list[list[int]]:
    """Slurm's indexes of the GPUs of each guest, in the guest's order; empty if the file does not exist."""
    guests = read_state(path).get("gpus", "")
    return [[int(index) for index in one.split(":") if index] for one in guests.split(",")] if guests else []


def uptime() -> float:
    """Seconds since the node's boot, of a clock that cannot be set; it counts during a suspend."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def age(fields: dict[str, str]) -> float:
    """For how many seconds a state has held; 0 if that is not known.

    State files are on a tmpfs, so this boot has written them.
    """
    since = fields.get("since", "")
    return max(0.0, uptime() - int(since)) if since.isascii() and since.isdecimal() else 0.0


def header(generation: Generation, image: str) -> dict[str, str]:
    """The fields that every version of the file has."""
    return {
        "job": str(generation.job_id),
        "restart": str(generation.restart),
        "generation": str(generation),
        "image": image,
    }
