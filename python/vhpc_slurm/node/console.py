"""The guest's serial console: what it says about a death, and the user's copy of it."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path

from vhpc_slurm.model import JobRequest
from vhpc_slurm.node import process
from vhpc_slurm.node.accounts import Account
from vhpc_slurm.terminal import printable

COPY_TIMEOUT_S = 10.0
LEFT_OUT = b"\n[%d bytes left out]\n"
"""Stands where the middle of a long console was."""


def prepare(path: Path, qemu_uid: int) -> None:
    """Make the console's file, for QEMU to write and for nobody else to read."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(path, flags, 0o600)
    os.fchown(fd, qemu_uid, -1)
    os.close(fd)


def last_words(path: Path) -> str:
    """The line that best tells why a guest ended: a panic, our init's complaint, or the last line.

    Empty when the console is.
    """
    lines = [line for line in _text(path, 64 * 1024).splitlines() if line.strip()]
    for mark in ("Kernel panic", "vhpc-init:", "vhpc-agent:"):
        for line in lines:
            if mark in line:
                return line[line.index(mark) :].strip()[:300]
    return lines[-1].strip()[:300] if lines else ""


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


def hand_over(path: Path, target: str, account: Account, limit_kib: int) -> str:
    """Copy the last ``limit_kib`` of a console to a file of the user, with the user's own rights.

    Returns why it cannot be written, empty when it was: a console that cannot be
    delivered must not change how the job ends.
    """
    data = _text(path, limit_kib * 1024)
    return _write(account, target, "bs=64k", data=data.encode())


def why_not(target: str, account: Account) -> str:
    """Why the user may not write a console to ``target``, empty when he may; makes the file, empty."""
    # a FIFO without a reader is not waited for
    return _write(account, target, "conv=notrunc", "oflag=append,nonblock", data=b"")


def _write(account: Account, target: str, *options: str, data: bytes) -> str:
    """Write to a file as the user, by dd(1); returns why that failed, empty when it did not."""
    script = 'umask 077; target=$1; shift; exec dd of="$target" status=none "$@"'
    command = [*process.drop_to(account.credentials), "/bin/sh", "-c", script, "sh", target, *options]
    try:
        done = subprocess.run(
            command,
            input=data,
            timeout=COPY_TIMEOUT_S,
            check=False,
            capture_output=True,
            cwd="/",
            env={"PATH": "/usr/bin:/bin", "LC_ALL": "C"},
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {COPY_TIMEOUT_S:.0f} s"
    except OSError as err:
        return str(err)
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
