# SPDX-License-Identifier: Apache-2.0
"""Attributes of sysfs whose read or write may never return.

The kernel takes a device's lock to bind, unbind or reset it, and for its
``driver_override`` too.  A driver can hold the lock without limit, and not
even SIGKILL ends a process that waits for it.  So a child accesses the
attribute, and its parent can stop waiting.
"""
# Decision: A child process writes to sysfs

from __future__ import annotations

import errno
import os
import select
import subprocess
import sys
import time

from vhpc_slurm.errors import NodeError

LIMIT = 4096
# Without a value it reads.  Its exit status is the errno.
_CHILD = """
import os, sys
try:
    flags = os.O_CLOEXEC | os.O_NOFOLLOW
    if len(sys.argv) > 2:
        os.write(os.open(sys.argv[1], os.O_WRONLY | flags), sys.argv[2].encode())
    else:
        os.write(1, os.read(os.open(sys.argv[1], os.O_RDONLY | flags), 4096))
except OSError as err:
    os._exit(err.errno)
os._exit(0)
"""


class Until:
    """A deadline that several accesses share."""

    def __init__(self, seconds: float) -> None:
        self._at = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds until the deadline; 0 if it has passed."""
        return max(0.0, self._at - time.monotonic())


class StuckError(NodeError):
    """The kernel did not answer: the device is locked, most likely until the node is rebooted."""


def write_attribute(path: str, text: str, timeout_s: float | Until) -> None:
    """Write one attribute.

    Raises:
        OSError: the kernel refused it.
        StuckError: it did not answer within ``timeout_s`` seconds or before the deadline.
    """
    _ask([path, text], timeout_s)


def read_attribute(path: str, timeout_s: float | Until) -> str:
    """Read one attribute, without surrounding blanks; raises as ``write_attribute``."""
    return _ask([path], timeout_s).decode("ascii", errors="replace").strip()


def _ask(args: list[str], timeout_s: float | Until) -> bytes:
    limit_s = timeout_s.left if isinstance(timeout_s, Until) else timeout_s
    child = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _CHILD, *args],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,  # slurmd waits until no process has the hook's stdout open
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        cwd="/",
        env={},
    )
    assert child.stdout is not None
    with child.stdout:
        pidfd = os.pidfd_open(child.pid)
        try:
            ended = select.select([pidfd], [], [], limit_s)[0]
        finally:
            os.close(pidfd)
        if not ended:
            child.kill()
            child.returncode = -9  # not waited for: it ends when the kernel answers
            raise StuckError(
                f"the kernel does not answer an access to {args[0]}",
                f"waited {limit_s:.3g} s; the device's driver is busy or hangs",
                "see dmesg; only a reboot reliably frees the device",
            )
        status, said = child.wait(), child.stdout.read(LIMIT)
    if status:
        number = status if status > 0 else errno.EINTR
        raise OSError(number, os.strerror(number), args[0])
    return said
