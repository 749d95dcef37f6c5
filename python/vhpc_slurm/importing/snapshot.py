# SPDX-License-Identifier: Apache-2.0
"""Writes what all users can read in a folder as an EROFS file system.

A guest's root reads every byte of the disk that it gets, whatever the modes say.  A process without
the rights of any account reads the files and writes the result: root changes to a uid of its own, so that no
other process can change what it writes.
"""

from __future__ import annotations

import json
import os
import pwd
import secrets
import select
import stat
import subprocess
import traceback
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NoReturn

from vhpc_slurm.errors import UserError
from vhpc_slurm.progress import Amount
from vhpc_slurm.terminal import last_line

MKFS = ("mkfs.erofs", "--quiet", "-zlz4", "-C65536", "-x-1")
"""Compressed like roots of images; without attributes of files, which guests could not use (nosuid)."""
UIDS = range(0x70000000, 0x7FFFFFF0)
"""Root reads with one of them; sites have no accounts there."""
NAMED = 5
"""Files that a refusal names."""
ACL = "system.posix_acl_access"
STEP_S = 2.0


class _RefusedError(Exception):
    """Why there is no snapshot, and what to do."""


def reader() -> int:
    """A uid that can read the files: for root a random one without an account, else that of this process."""
    if os.geteuid() != 0:
        return os.geteuid()
    while True:
        uid = secrets.choice(UIDS)
        try:
            pwd.getpwuid(uid)
        except KeyError:
            return uid


def write(
    top: Path,
    target: Path,
    excluded: Collection[str],
    uid: int,
    step: Callable[[str], None] = lambda _: None,
) -> tuple[int, int]:
    """Write a folder as an EROFS file system.

    Args:
        top: the folder.
        target: an existing file of ``uid``.
        excluded: paths below the folder that are left out, with all below them.
        uid: of ``reader``.
        step: is told every few seconds how much is written.

    Returns:
        the number of regular files in it, and their bytes.

    Raises:
        UserError: a file is not for all users, or mkfs.erofs fails.
    """
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ours)
        _write_and_end(theirs, top, target, frozenset(excluded), uid)
    os.close(theirs)
    with open(ours, "rb", buffering=0) as pipe:  # noqa: PTH123 - a descriptor
        while not select.select([pipe], [], [], STEP_S)[0]:
            step(Amount(f"{top}: written", target.stat().st_size))
        said = pipe.read()
    os.waitpid(child, 0)
    found: dict[str, Any] = json.loads(said) if said else {"why": ["the process that read it was killed"]}
    if "why" in found:
        raise UserError(f"cannot make a snapshot of {top}", *found["why"])
    return found["files"], found["bytes"]


def _write_and_end(answer: int, top: Path, target: Path, excluded: frozenset[str], uid: int) -> NoReturn:
    """The child: writes its result, as JSON, and ends whatever happens."""
    try:
        if os.geteuid() == 0:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
        files, size = _written(top, target, excluded)
        result: dict[str, Any] = {"files": files, "bytes": size}
    except _RefusedError as err:
        result = {"why": err.args}
    except OSError as err:
        result = {"why": [f"{err.strerror}: {err.filename}" if err.filename else str(err)]}
    except BaseException:
        result = {"why": [last_line(traceback.format_exc())]}
    os.write(answer, json.dumps(result).encode())
    os._exit(0)


def _written(top: Path, target: Path, excluded: frozenset[str]) -> tuple[int, int]:
    files, size, closed = scan(top, excluded)
    if closed:
        more = f" and {len(closed) - NAMED} more" if len(closed) > NAMED else ""
        raise _RefusedError(
            f"not all users can read what a guest's root could read then: {', '.join(closed[:NAMED])}{more}",
            "leave them out with --exclude=PATH, or make them readable for all",
        )
    options = [f"--exclude-path={path}" for path in excluded]
    done = subprocess.run(
        [*MKFS, *options, str(target), str(top)],
        check=False,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        restore_signals=False,
    )
    if done.returncode:
        raise _RefusedError(f"mkfs.erofs ended with status {done.returncode}: {last_line(done.stderr)}")
    return files, size


def scan(top: Path, excluded: Collection[str]) -> tuple[int, int, list[str]]:
    """Count the files of a folder, and find those that not all users can read.

    Returns:
        the number of regular files, their bytes, and the paths, ``.`` for the folder itself, that some user
        cannot read: by their mode, that of a folder above, or perhaps by an ACL.
    """
    shut = (above for above in top.resolve().parents if not above.stat().st_mode & 0o001)
    if any(shut) or not _is_open(str(top), top.stat()):
        return 0, 0, ["."]
    closed, sizes, stack = [], dict[tuple[int, int], int](), [""]
    while stack:
        above = stack.pop()
        for entry in os.scandir(top / above):
            path = f"{above}/{entry.name}" if above else entry.name
            about = entry.stat(follow_symlinks=False)
            is_folder = stat.S_ISDIR(about.st_mode)
            if path in excluded or not (is_folder or stat.S_ISREG(about.st_mode)):
                continue
            if not _is_open(entry.path, about):
                closed.append(path)
            elif is_folder:
                stack.append(path)
            else:
                sizes[about.st_dev, about.st_ino] = about.st_size
    return len(sizes), sum(sizes.values()), sorted(closed)


def _is_open(path: str, about: os.stat_result) -> bool:
    wanted = 0o005 if stat.S_ISDIR(about.st_mode) else 0o004
    if about.st_mode & wanted != wanted:
        return False
    try:
        return ACL not in os.listxattr(path, follow_symlinks=False)
    except OSError:  # a file system without attributes
        return True
