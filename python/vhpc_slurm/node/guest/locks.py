# SPDX-License-Identifier: Apache-2.0
"""The lock daemon of a guest, vhpc-locks: it takes the locks of the guest's programs on the host's files.

virtiofsd has no locks, so a lock that the guest's kernel grants holds within that guest alone.  A broker in
the guest sends each lock of a program on a file of a shared folder to this daemon, by a virtio-serial port of
its own (guest/locks/).  The daemon has the job user's rights, as virtiofsd has: root in the guest can lock
what the user can lock.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from vhpc_slurm.model import Share
from vhpc_slurm.node.guest import shares
from vhpc_slurm.node.host import confine
from vhpc_slurm.node.host.confine import Confinement, Started

NAME = "locks"
PROGRAM = "vhpc-locks"
CALLED = "the lock daemon of the shared folders"
OPEN_FILES = 65536
"""A descriptor for each open file of the guest that has a lock."""


def command(libexec: str, wanted: Iterable[Share], listener: int) -> list[str]:
    """Command line of the daemon; ``listener``: its socket, for the one connection of QEMU."""
    argv = [f"{libexec}/{PROGRAM}", f"--listen-fd={listener}"]
    for share in wanted:
        option = "--share-read-only" if share.read_only else "--share"
        argv.append(f"{option}={share.tag}:{share.locks}:{share.path}")
    return argv


def serve(
    libexec: str,
    wanted: Iterable[Share],
    confinement: Confinement,
    *,
    socket_path: Path,
    qemu_uid: int,
    generation: str,
    stderr: int,
) -> Started:
    """Start the daemon; its caller waits for it (``Started.finish``).

    Args:
        libexec: folder of its program.
        wanted: shares that need it (``Share.needs_lock_daemon``), of those that are served.
        confinement: rights and bounds; it sees the host's root directory.
        socket_path: where QEMU finds it; made here, for QEMU's uid alone.
        qemu_uid: that uid.
        generation: marker for the scan.
        stderr: descriptor that its messages go to.

    Raises:
        NodeError: it does not start.
    """
    own = replace(confinement, limits=(*confinement.limits, ("nofile", OPEN_FILES)))
    with shares.listen(socket_path, qemu_uid) as listener:
        argv = command(libexec, wanted, listener.fileno())
        return confine.start(argv, own, generation=generation, stderr=stderr, pass_fds=(listener.fileno(),))
