# SPDX-License-Identifier: Apache-2.0
"""passt of a guest: the directory of its socket, the wait until QEMU can connect, the guest's interface.

passt makes the socket itself, so it needs a directory that it may write to. The job's
user, whose uid it has, must not replace the socket there: the directory belongs to the
group that only passt has, and to root alone when the socket is there.
"""

from __future__ import annotations

import os
import stat
import time
from contextlib import suppress
from pathlib import Path

from vhpc_slurm.errors import NodeError
from vhpc_slurm.node.host import process

NAME = "passt"
OPEN_FILES = 65536
"""Each connection of the guest takes a descriptor, a TCP connection at high speed five."""
UNIX_SOCKETS = Path("/proc/net/unix")
_LISTENS = 0x10000
"""__SO_ACCEPTCON, in the column Flags of /proc/net/unix (proc(5))."""
POLL_S = 0.02


def make_directory(path: Path, gid: int) -> None:
    """Make the directory of the socket, which a process of this group may write to."""
    path.mkdir(mode=0o700)
    os.chown(path, 0, gid, follow_symlinks=False)
    path.chmod(0o770)


def hand_over(path: Path, ref: process.ProcessRef, owner: int, qemu_uid: int, timeout_s: float) -> None:
    """Wait until passt listens, and let only QEMU connect; then nothing in the directory can change.

    Args:
        path: of the socket.
        ref: passt.
        owner: its uid.
        qemu_uid: of the guest's QEMU.
        timeout_s: how long passt may take.

    Raises:
        NodeError: it ends or does not listen, or has made something else.
    """
    until = time.monotonic() + timeout_s
    while not _listens(path):
        if not process.alive(ref):
            raise NodeError(
                "passt ended when it was started", "", "see network.passt in vhpc.toml(5), and: vhpc doctor"
            )
        if time.monotonic() >= until:
            raise NodeError("passt does not listen", f"waited {timeout_s:.0f} s", "check the node's load")
        time.sleep(POLL_S)
    os.chown(path.parent, 0, 0, follow_symlinks=False)
    path.parent.chmod(0o711)
    fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        about = os.fstat(fd)
        if not stat.S_ISSOCK(about.st_mode) or about.st_uid != owner or about.st_nlink != 1:
            raise NodeError(f"{path} is not the socket of passt")
        link = Path(f"/proc/self/fd/{fd}")  # the socket itself, whatever its path leads to now
        os.chown(link, qemu_uid, -1)
        link.chmod(0o600)
    finally:
        os.close(fd)


def _listens(path: Path) -> bool:
    """Whether a socket with this path listens."""
    with suppress(OSError):
        for line in UNIX_SOCKETS.read_text(errors="replace").splitlines()[1:]:
            words = line.split(maxsplit=7)
            if len(words) == 8 and words[7] == str(path) and int(words[3], 16) & _LISTENS:
                return True
    return False
