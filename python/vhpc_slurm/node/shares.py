"""Folders of the host inside the guest: one virtiofsd per share, run as the job user.

The daemon's own credentials are the boundary: whatever guest root asks of it,
the host kernel answers as it would answer the job user.  That holds only if
the daemon is started by us; libvirt would start it as root (docs/decisions.md).
The daemon opens the shared folder itself, after the drop, so root never walks
a path that a user owns.
"""

from __future__ import annotations

import os
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from vhpc_slurm.config import Shares
from vhpc_slurm.errors import NodeError
from vhpc_slurm.node import process
from vhpc_slurm.node.accounts import Account

# Folders that belong to the guest's own system; mounting the host's over them
# would replace the very operating system that the user asked for.
SYSTEM = tuple(
    PurePosixPath(p)
    for p in (
        "/usr",
        "/etc",
        "/bin",
        "/sbin",
        "/lib",
        "/lib32",
        "/lib64",
        "/dev",
        "/proc",
        "/sys",
        "/run",
        "/boot",
    )
)
TOPS = ("/", "/var", "/tmp", "/home", "/opt", "/srv", "/mnt")  # noqa: S108 - compared, never opened
SYSTEM_ONLY_ITSELF = tuple(PurePosixPath(p) for p in TOPS)

# virtiofsd keeps one descriptor per inode the guest knows of, and asks for this many itself.
OPEN_FILES = 1_000_000
NR_OPEN = Path("/proc/sys/fs/nr_open")


@dataclass(frozen=True)
class Share:
    """A folder of the host, mounted in the guest at the same path.

    ``tag`` is what the guest mounts it by, ``why`` is ``home``, ``workdir`` or ``site``.
    """

    tag: str
    path: str
    read_only: bool
    why: str


def wanted(config: Shares, account: Account, work_dir: str) -> tuple[list[Share], list[str]]:
    """Which folders this job's guests see, outermost first, and notes on what was left out.

    A path that another share already holds is not shared twice.  The working
    directory may lie in the guest's own system (``/tmp``, ``/usr/src``): then
    the job starts in the guest's folder of that name.
    """
    asked = [(path, path in config.read_only, "site") for path in config.site]
    if config.home:
        asked.append((account.home, False, "home"))
    if config.work_dir:
        asked.append((work_dir, False, "workdir"))
    shares: list[Share] = []
    notes: list[str] = []
    for path, read_only, why in asked:
        clean = PurePosixPath(os.path.normpath(path))
        if not clean.is_absolute() or _is_system(clean):
            notes.append(f"{why} {path!r} is a place of the guest's own system: not shared")
        elif not any(clean.is_relative_to(s.path) for s in shares):
            shares.append(Share(f"{why}{len(shares)}", str(clean), read_only, why))
    return sorted(shares, key=lambda s: len(PurePosixPath(s.path).parts)), notes


def reachable(share: Share, account: Account, timeout_s: float) -> bool:
    """Whether the user can enter the folder; asked with his own rights, within a deadline.

    Raises:
        NodeError: the file system does not answer.
    """
    command = [
        *process.drop_to(account.credentials),
        "/usr/bin/test",
        "-d",
        share.path,
        "-a",
        "-x",
        share.path,
    ]
    try:
        return (
            subprocess.run(command, timeout=timeout_s, check=False, stdin=subprocess.DEVNULL).returncode == 0
        )
    except subprocess.TimeoutExpired:
        raise NodeError(
            f"{share.path} does not answer", f"waited {timeout_s:.0f} s", "check the file system"
        ) from None


def serve(
    config: Shares,
    share: Share,
    account: Account,
    *,
    socket_path: Path,
    qemu_uid: int,
    generation: str,
    log: Path,
) -> process.ProcessRef:
    """Start the daemon of a share.

    Args:
        config: names the daemon.
        share: what to serve.
        account: whom to run as.
        socket_path: where QEMU finds the daemon; made here, for QEMU's uid alone.
        qemu_uid: that uid.
        generation: marker for the scan.
        log: where the daemon's messages go.

    Raises:
        NodeError: it does not start.
    """
    listener = listen(socket_path, qemu_uid)
    try:
        argv = [
            config.virtiofsd,
            f"--fd={listener.fileno()}",
            f"--shared-dir={share.path}",
            "--sandbox=none",
            "--announce-submounts",
            "--cache=auto",
            "--log-level=error",
        ]
        if share.read_only:
            argv.append("--readonly")
        return process.spawn(
            argv,
            who=account.credentials,
            generation=generation,
            log=log,
            pass_fds=(listener.fileno(),),
            open_files=min(OPEN_FILES, int(NR_OPEN.read_text())),
        )
    finally:
        listener.close()


def listen(path: Path, owner: int) -> socket.socket:
    """A listening unix socket that only ``owner`` and root may connect to."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    old = os.umask(0o177)
    try:
        path.unlink(missing_ok=True)
        sock.bind(str(path))
        os.chown(path, owner, -1, follow_symlinks=False)
        sock.listen(64)
    except OSError as err:
        sock.close()
        raise NodeError(f"cannot listen on {path}", str(err)) from err
    finally:
        os.umask(old)
    return sock


def _is_system(path: PurePosixPath) -> bool:
    return path in SYSTEM_ONLY_ITSELF or any(path.is_relative_to(p) for p in SYSTEM)
