# SPDX-License-Identifier: Apache-2.0
"""Where the node reads a blob from: a file of the site's catalogue, or one of a user's own catalogue.

Root opens no file of a user: a child process with the user's rights reads it and writes
it to a pipe. If the user's file system hangs, the child hangs, and the reader has a deadline.
"""

from __future__ import annotations

import contextlib
import os
import select
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

from vhpc_slurm.errors import UserError
from vhpc_slurm.model import Blob
from vhpc_slurm.node.host import process
from vhpc_slurm.node.host.accounts import Account
from vhpc_slurm.record import Record

DD = "/usr/bin/dd"
TOLD = 300
"""Bytes of the child's error message that are shown."""
END_S = 1.0


class Source(Record, frozen=True):
    """A descriptor with a blob's bytes, and the child that writes them, if there is one."""

    fd: int
    child: subprocess.Popen[bytes] | None = None

    def wait(self, seconds: float) -> bool:
        """Whether ``read`` will not block, after at most so many seconds."""
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        return bool(poll.poll(int(seconds * 1000)))

    def read(self, size: int) -> bytes:
        """At most ``size`` bytes; none at the end."""
        return os.read(self.fd, size)

    def why_ended(self) -> str:
        """Why a child ended early, as it says; empty if it did not say, or if there is none."""
        if self.child is None or self.child.stderr is None:
            return ""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.child.wait(END_S)
        if not select.select([self.child.stderr], [], [], 0)[0]:
            return ""
        said = os.read(self.child.stderr.fileno(), TOLD).decode("utf-8", "replace")
        return said.strip().rpartition(": ")[2]


@contextlib.contextmanager
def of_site(path: Path, blob: Blob, image: str, start: int = 0) -> Iterator[Source]:
    """A blob of the site's catalogue, from a byte on.

    Raises:
        UserError: it is missing, not a regular file, or has another size.
    """
    try:
        # a pipe there must not block the hook
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as err:
        raise UserError(
            f"image {image} is incomplete",
            f"its {blob.file} is not in the catalogue: {err.strerror}",
            "publish it again",
        ) from err
    try:
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode):
            raise damaged(image, blob, "it is not a regular file")
        if about.st_size != blob.size:
            raise damaged(image, blob, f"it has {about.st_size} bytes, the manifest says {blob.size}")
        os.lseek(fd, start, os.SEEK_SET)
        yield Source(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def of_user(path: Path, account: Account, start: int = 0) -> Iterator[Source]:
    """A blob of a user's own catalogue, read with the user's rights, from a byte on.

    Raises:
        OSError: no process can be started.
    """
    # without a writer, a pipe of the user's is at its end at once
    command = [DD, f"if={path}", "iflag=nonblock,skip_bytes", "bs=1M", "status=none"]
    command += [f"skip={start}"] if start else []
    child = subprocess.Popen(
        [*process.drop_to(account.credentials), *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd="/",
        env={"PATH": "/usr/bin:/bin", "LC_ALL": "C"},
        start_new_session=True,
    )
    assert child.stdout is not None
    assert child.stderr is not None
    try:
        yield Source(child.stdout.fileno(), child)
    finally:
        child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(END_S)  # one that is blocked in the kernel ends when its file system answers
        child.stdout.close()
        child.stderr.close()


def damaged(image: str, blob: Blob, why: str) -> UserError:
    """The error of a blob that is not what the manifest says."""
    return UserError(f"image {image} is damaged", f"{blob.file}: {why}", "publish it again")
