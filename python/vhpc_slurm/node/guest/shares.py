# SPDX-License-Identifier: Apache-2.0
"""Folders of the host inside the guest: one virtiofsd per share, run as the job user.

The daemon's own credentials are the boundary: whatever guest root asks of it,
the host kernel answers as it would answer the job user.  That holds only if
the daemon is started by us; libvirt would start it as root.
The shared folder is opened with the user's rights (confine/share.c), so root
never walks a path that a user owns, and what was really opened is all that the
daemon sees of the host.
"""

# Decision: vhpc starts virtiofsd itself

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path, PurePosixPath

from vhpc_slurm.config import Config
from vhpc_slurm.config.shares import Shares
from vhpc_slurm.errors import NodeError
from vhpc_slurm.model import JobRequest, Share
from vhpc_slurm.node.host import confine, selinux
from vhpc_slurm.node.host.accounts import Account
from vhpc_slurm.node.host.confine import Confinement, SharedDirectory
from vhpc_slurm.policy import visible_shares
from vhpc_slurm.record import Record

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
MIGRATION = (
    "--migration-mode=find-paths",
    "--migration-verify-handles",
    "--migration-confirm-paths",
    "--migration-on-error=guest-error",
)
"""A saved inode is its path and its file handle: a file that was replaced is an error of the guest alone."""


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
            cache = config.cache_of(path if why == "site" else str(clean))
            locks = config.locks_of(str(clean))
            shares.append(Share(f"{why}{len(shares)}", str(clean), read_only, why, cache, locks))
    return sorted(shares, key=lambda s: len(PurePosixPath(s.path).parts)), notes


def of_job(config: Config, account: Account, request: JobRequest) -> tuple[Share, ...]:
    """Which folders the guests of a job see; the working directory is looked up with the user's rights.

    Raises:
        UserError, NodeError: as ``attempt``.
    """
    program = f"{config.paths.libexec}/vhpc-confine"
    real = real_work_dir(request.work_dir, program, account, config.guests.stage_timeout_s)
    found, _ = wanted(visible_shares(config, request), account, real)
    return tuple(found)


class Trial(Record, frozen=True):
    """The result of an attempt to share a folder: its real path, and why it would not be shared."""

    real_path: str
    why_not: str


def attempt(path: str, program: str, account: Account, timeout_s: float) -> Trial:
    """Try to share a folder, with the user's own rights.

    Args:
        path: the folder.
        program: path of vhpc-confine.
        account: the user.
        timeout_s: how long the file system may take to answer.

    Raises:
        UserError: a file system of the user's does not answer.
        NodeError: another file system does not answer.
    """
    own = Confinement(program, account.credentials, share=SharedDirectory(path, read_only=True))
    with Path("/dev/null").open("w") as null:
        trial = confine.start(["/usr/bin/true"], own, generation="", stderr=null.fileno())
    try:
        trial.finish(timeout_s)
    except confine.ShareAbsentError as err:
        return Trial(trial.real_path, f"{account.name} cannot enter it: {err}")
    except confine.ShareRefusedError as err:
        return Trial(trial.real_path, err.why)
    return Trial(trial.real_path, "")


def real_work_dir(work_dir: str, program: str, account: Account, timeout_s: float) -> str:
    """The folder that a working directory is, which may be a link: a task finds itself there.

    Where it is, and not what it is called, decides what the guest gets.  A
    place of the guest's own system, and what the user cannot enter, stays as
    it is.

    Raises:
        UserError, NodeError: as ``attempt``.
    """
    if _is_system(PurePosixPath(os.path.normpath(work_dir))):
        return work_dir
    return attempt(work_dir, program, account, timeout_s).real_path or work_dir


def confined(confinement: Confinement, share: Share) -> Confinement:
    """Rights and bounds of the daemon of a share, from those of a helper; it sees the folder alone."""
    open_files = min(OPEN_FILES, int(NR_OPEN.read_text()))
    return replace(
        confinement,
        share=SharedDirectory(share.path, share.read_only),
        limits=(*confinement.limits, ("nofile", open_files)),
    )


def command(config: Shares, share: Share, listener: int, *, migrates: bool = False) -> list[str]:
    """Command line of a share's daemon, which sees the folder as ``/share``; ``listener``: its socket.

    ``migrates``: its state can be saved with the guest, and be restored.
    """
    argv = [
        config.virtiofsd,
        f"--fd={listener}",
        "--shared-dir=/share",
        "--sandbox=none",
        "--announce-submounts",
        f"--cache={share.cache}",
        f"--thread-pool-size={config.threads}",
        "--log-level=error",
        "--rlimit-nofile=0",  # leaves it as vhpc-confine has set it
    ]
    if migrates:
        argv += MIGRATION
    return [*argv, "--readonly"] if share.read_only else argv


def listen(path: Path, owner: int) -> socket.socket:
    """A listening unix socket that only ``owner`` and root may connect to."""
    with selinux.sockets_of_helpers():
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
