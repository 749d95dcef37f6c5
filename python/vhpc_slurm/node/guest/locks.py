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

from vhpc_slurm.model import Share
from vhpc_slurm.node.host.confine import Confinement

NAME = "locks"
PROGRAM = "vhpc-locks"
CALLED = "the lock daemon of the shared folders"
OPEN_FILES = 65536
"""A descriptor for each open file of the guest that has a lock."""


def command(libexec: str, wanted: Iterable[Share], listener: int) -> list[str]:
    """Command line of the daemon.

    Args:
        libexec: folder of its program.
        wanted: shares that need it (``Share.needs_lock_daemon``), of those that are served.
        listener: descriptor of its socket, for the one connection of QEMU.
    """
    argv = [f"{libexec}/{PROGRAM}", f"--listen-fd={listener}"]
    for share in wanted:
        option = "--share-read-only" if share.read_only else "--share"
        argv.append(f"{option}={share.tag}:{share.locks}:{share.path}")
    return argv


def confined(confinement: Confinement) -> Confinement:
    """Rights and bounds of the daemon, from those of a helper; it sees the host's root directory."""
    return replace(confinement, limits=(*confinement.limits, ("nofile", OPEN_FILES)))
