# SPDX-License-Identifier: Apache-2.0
"""The guest's serial console: what it says about a death, and the user's copy of it."""

from __future__ import annotations

import errno
import logging
import os
import re
import struct
import time
from collections.abc import Sequence
from pathlib import Path

from vhpc_slurm.model import JobRequest
from vhpc_slurm.node.host import process
from vhpc_slurm.node.host.accounts import Account
from vhpc_slurm.record import Record
from vhpc_slurm.terminal import printable

log = logging.getLogger("vhpc")

COPY_TIMEOUT_S = 10.0
NO_WAIT = "oflag=nonblock"
"""Of dd(1): a FIFO without a reader, or with a slow one, takes nothing more."""
_STAMP = re.compile(r"^(?:\[ *[\d.]+\])?(?:\[ *[TC]\d+\])? *")
_FIRST_OOPS = "[#1]"
"""In the kernel's line that names an exception (die() of x86 and of arm64)."""
_AT = ("RIP: ", "pc : ")
LEFT_OUT = b"\n[%d bytes left out]\n"
"""Stands where the middle of a long console was."""


def prepare(path: Path, owner_uid: int) -> None:
    """Make the console's file, which only root and the job's owner may read.

    virtlogd writes it, as root, which SELinux lets open no files of others.  The owner reads it by an
    access list: a group may have other members.  Where the file system has no access lists, only root
    reads it.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(path, flags, 0o600)
    try:
        os.setxattr(fd, "system.posix_acl_access", _readable_by(owner_uid))
    except OSError as err:
        if err.errno != errno.ENOTSUP:
            raise
        log.warning("users cannot read consoles on this node: %s has no access lists", path.parent)
    finally:
        os.close(fd)


def _readable_by(uid: int) -> bytes:
    """An access list as the kernel reads it (linux/posix_acl_xattr.h): the file's owner rw, a user r."""
    user_obj, user, group_obj, mask, other, nobody = 0x01, 0x02, 0x04, 0x10, 0x20, 0xFFFFFFFF
    entries = (
        (user_obj, 6, nobody),
        (user, 4, uid),
        (group_obj, 0, nobody),
        (mask, 4, nobody),
        (other, 0, nobody),
    )
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


def last_words(path: Path) -> str:
    """The line that best tells why a guest ended: a panic, our init's complaint, or the last line.

    A panic at an exception has the exception and its place behind it.  Empty when the console is.
    """
    lines = [line for line in _text(path, 64 * 1024).splitlines() if line.strip()]
    for mark in ("Kernel panic", "vhpc-init:", "vhpc-agent:"):
        for line in lines:
            if mark in line:
                return (line[line.index(mark) :].strip() + _exception(lines))[:300]
    return lines[-1].strip()[:300] if lines else ""


def _exception(lines: Sequence[str]) -> str:
    """The exception and the place of the kernel's first oops, in brackets; empty without an oops."""
    texts = [_STAMP.sub("", line).strip() for line in lines]
    first = next((number for number, text in enumerate(texts) if _FIRST_OOPS in text), None)
    if first is None:
        return ""
    place = next((text for text in texts[first:] if text.startswith(_AT)), None)
    return " (" + ", ".join(filter(None, (texts[first], place))) + ")"


def of_guests(folder: Path) -> list[tuple[int, Path]]:
    """Consoles below a job's run folder, also those that nothing was written to, by guest."""
    return sorted((int(path.parent.name[1:]), path) for path in folder.glob("g[0-9]*/console.log"))


def user_path(request: JobRequest, node: str, guest: int = 0) -> str:
    """Where the user's copy goes: ``--vhpc-console`` (%j job, %N node), or the working directory.

    Those of further guests on a node have their number at the end.
    """
    pattern = request.console or "vhpc-%j-%N.console"
    name = (
        pattern.replace("%%", "\0").replace("%j", str(request.job_id)).replace("%N", node).replace("\0", "%")
    )
    return os.path.normpath(Path(request.work_dir) / name) + (f".g{guest}" if guest else "")


class Copy(Record, frozen=True):
    """A user's copy of a console: where it is, and why it could not be written; empty when it was."""

    target: str
    why_not: str


def hand_over(
    consoles: Sequence[tuple[int, Path]], request: JobRequest, node: str, account: Account, limit_kib: int
) -> list[Copy]:
    """Copy the last ``limit_kib`` of each console to a file of the user, with the user's own rights.

    A console that cannot be delivered must not change how the job ends.  All of
    them share one deadline, and no reader of a FIFO is waited for.
    """
    until = time.monotonic() + COPY_TIMEOUT_S
    copies = []
    for index, path in consoles:
        target = user_path(request, node, index)
        data = _text(path, limit_kib * 1024)
        left = until - time.monotonic()
        written = _write(account, target, "bs=64k", NO_WAIT, data=data.encode(), timeout_s=left)
        copies.append(Copy(target, written))
    return copies


def why_not(target: str, account: Account) -> str:
    """Why the user may not write a console to ``target``, empty when he may; makes the file, empty."""
    return _write(account, target, "conv=notrunc", f"{NO_WAIT},append", data=b"", timeout_s=COPY_TIMEOUT_S)


def _write(account: Account, target: str, *options: str, data: bytes, timeout_s: float) -> str:
    """Write to a file as the user, by dd(1); returns why that failed, empty when it did not."""
    if timeout_s <= 0:
        return f"no time was left of {COPY_TIMEOUT_S:.0f} s for all consoles"
    script = 'umask 077; target=$1; shift; exec dd of="$target" status=none "$@"'
    command = [*process.drop_to(account.credentials), "/bin/sh", "-c", script, "sh", target, *options]
    try:
        done = process.run_briefly(command, data, timeout_s)
    except OSError as err:
        return str(err)
    if done is None:
        return f"no answer within {COPY_TIMEOUT_S:.0f} s"
    said = done.stderr.decode(errors="replace").strip().rpartition(": ")[2]
    return (said or f"exit status {done.returncode}") if done.returncode else ""


def read_on(fd: int, size: int) -> tuple[int, bytes]:
    """Read on in a console from where ``fd`` stands, past the hole that the shim makes in a long one.

    Returns (how many bytes are left out before, at most ``size`` bytes); no bytes at the end.
    """
    at = os.lseek(fd, 0, os.SEEK_CUR)
    try:
        begin = os.lseek(fd, at, os.SEEK_DATA)
        end = os.lseek(fd, begin, os.SEEK_HOLE)
    except OSError as err:
        if err.errno != errno.ENXIO:
            raise
        return 0, b""  # nothing behind ``at``
    os.lseek(fd, begin, os.SEEK_SET)
    return begin - at, os.read(fd, min(size, end - begin))


def _text(path: Path, limit: int) -> str:
    """The end of the file; control characters but line feeds and tabs are replaced."""
    raw = b""
    try:
        with path.open("rb", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - limit))
            while (found := read_on(file.fileno(), limit - len(raw)))[1]:
                skipped, piece = found
                raw += (LEFT_OUT % skipped if skipped else b"") + piece
    except OSError:
        return ""
    text = raw.decode(errors="replace").replace("\r\n", "\n").replace("\r", "\n")
    return printable(text, keep="\n\t")
