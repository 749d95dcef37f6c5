# SPDX-License-Identifier: Apache-2.0
"""Linux calls that Python 3.11's os module lacks: namespaces, mounts, prctl.

Every function raises OSError with the kernel's errno; see the man page of the
same name in section 2.
"""

from __future__ import annotations

import ctypes
import os

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
# namespaces of a lab host
HOST_NAMESPACES = CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET

MS_RDONLY = 0x1
MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_NOEXEC = 0x8
MS_REMOUNT = 0x20
MS_BIND = 0x1000
MS_REC = 0x4000
MS_SLAVE = 0x80000

_MNT_DETACH = 2
_PR_SET_PDEATHSIG = 1
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """Give this process new namespaces; a new pid namespace begins with its next child."""
    _check(_libc.unshare(flags), "unshare")


def setns(fd: int, flags: int) -> None:
    """Enter namespaces of the process of the pidfd `fd` (Linux >= 5.8)."""
    _check(_libc.setns(fd, flags), "setns")


def mount(source: str, target: str, kind: str, flags: int = 0, options: str = "") -> None:
    """Mount `source` of file system type `kind` on `target`."""
    _check(
        _libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode()),
        f"mount {kind or 'bind'} on {target}",
    )


def bind(source: str, target: str, *, read_only: bool = False) -> None:
    """Bind-mount `source` on `target`; read-only needs a second call, see mount(2)."""
    mount(source, target, "", MS_BIND)
    if read_only:
        mount("", target, "", MS_BIND | MS_REMOUNT | MS_RDONLY)


def enter_root(path: str) -> None:
    """Make the mount point `path` the root of this mount namespace and drop the old root."""
    os.chdir(path)
    _check(_libc.syscall(ctypes.c_long(_SYS_PIVOT_ROOT[os.uname().machine]), b".", b"."), "pivot_root")
    # pivot_root(2), "pivot_root(".", ".")": the old root is now mounted over the new one
    _check(_libc.umount2(b".", _MNT_DETACH), "umount2")
    os.chdir("/")


def die_with_parent(signal_number: int) -> None:
    """Have the kernel send this process a signal when its parent ends."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal_number), 0, 0, 0), "prctl")
