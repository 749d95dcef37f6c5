# SPDX-License-Identifier: Apache-2.0
"""A separate uid for every guest's QEMU, from a range that belongs to vhpc.

With libvirt's shared default user one escaped guest could control all others.
A uid is allocated by a file that names its generation.

A compromised QEMU may leave a setuid file; the guest's user can assume the uid
with it later.  Therefore uids rotate: one is used again only when all others
have been used, also after a reboot, and not while it owns a process, or a file
in a world-writable folder.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pwd
import re
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from vhpc_slurm import files
from vhpc_slurm.config import Config
from vhpc_slurm.errors import NodeError, TeardownError, VhpcError
from vhpc_slurm.model import Generation
from vhpc_slurm.node.checked import CheckResult, error, ok
from vhpc_slurm.node.finding import Kind, NodeFinding
from vhpc_slurm.node.host import accounts, process
from vhpc_slurm.node.resource.protocol import Resource, orphan_of
from vhpc_slurm.node.store.journal import Entry, Journal
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.record import Record

log = logging.getLogger("vhpc")
FIND = "/usr/bin/find"
LOCK_TIMEOUT_S = 30.0
SCAN_S = 2.0
"""Limit of the search for files: a user's files in /tmp must not drain a node."""
SUBUID = Path("/etc/subuid")
_SUBUID = re.compile(r"^[^:#]+:(\d+):(\d+)\s*$")


class UidData(Record, frozen=True):
    """The entry of a uid."""

    uid: int


class Uid(Resource):
    """The uid of a guest's QEMU."""

    kind = "uid"

    def take(self, layout: Layout, journal: Journal) -> int:
        """Allocate a uid; raises as ``allocate``."""
        announced: list[str] = []

        def announce(uid: int) -> None:
            """Journal first; if another job took the uid first, its entry is removed."""
            if announced:
                journal.released(announced.pop())
            announced.append(f"{self.kind}:{uid}")
            journal.announce(self.kind, announced[0], UidData(uid))

        return allocate(layout, str(journal.generation), announce)

    def release(self, layout: Layout, generation: Generation, entry: Entry) -> None:
        """End the processes of the uid, and remove its allocation."""
        release(layout, entry.read(UidData).uid, str(generation))

    def orphans(self, layout: Layout) -> Iterator[NodeFinding]:
        """Uids of generations without a journal."""
        for uid, name in list(allocated(layout)):
            what = f"uid {uid} is allocated to generation {name[:40]!r}, which has no journal"
            repair = partial(release, layout, uid, name)
            yield from orphan_of(layout, name, Kind.ORPHAN_UID, what, repair)

    def check(self, config: Config, node: str, *, root: bool) -> Iterator[CheckResult]:
        """Whether the uids of QEMU are unused, and its group exists."""
        del node, root
        yield from uid_range(config, SUBUID)
        yield qemu_group(config)


def allocate(layout: Layout, generation: str, announce: Callable[[int], object]) -> int:
    """Allocate the uid that has not been used for the longest time.

    Args:
        layout: has the configuration and the path of the allocations.
        generation: the guest's generation.
        announce: called with the uid before it is allocated (journal first).

    Raises:
        NodeError: no uid of the range is free, or another Prolog keeps the lock.
    """
    config = layout.config.guests
    layout.uids.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _Rotation(layout) as rotation, _search(layout) as owners_of_files:
        in_use = process.uids_in_use()  # while find(1) runs
        owners = owners_of_files()
        for uid in rotation.order():
            path = layout.uids / str(uid)
            if path.exists() or uid in in_use:
                continue
            if uid in owners:
                log.warning(
                    "uid %d owns files in %s, so no guest gets it; remove these files",
                    uid,
                    " ".join(config.uid_check_paths),
                )
                continue
            announce(uid)
            try:
                fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            except FileExistsError:
                continue  # another job's Prolog was faster; this job must not release its allocation
            try:
                files.write(fd, generation.encode())
            except OSError:
                path.unlink()  # no release would find a file that names no generation
                raise
            finally:
                os.close(fd)
            rotation.used(uid)
            return uid
    raise NodeError("no free uid for a guest", f"all {config.uid_count} are in use", "raise guests.uid_count")


class _Rotation:
    """The next uid, in a file that survives reboots; locked while it is open."""

    def __init__(self, layout: Layout) -> None:
        self._path = layout.state / "uid-next"
        self._base, self._count = layout.config.guests.uid_base, layout.config.guests.uid_count

    def __enter__(self) -> _Rotation:
        self._path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        self._fd = files.open_lock(self._path)
        try:
            if not files.lock(self._fd, LOCK_TIMEOUT_S):
                raise NodeError(
                    "another job's Prolog holds the lock of the uids for too long", str(self._path)
                )
            try:
                self._next = int(os.pread(self._fd, 32, 0))
            except ValueError:  # a new file, or one torn by a power cut
                self._next = self._base
        except BaseException:
            os.close(self._fd)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def order(self) -> Iterator[int]:
        """All uids, the least recently used one first."""
        first = self._next - self._base if self._base <= self._next < self._base + self._count else 0
        for step in range(self._count):
            yield self._base + (first + step) % self._count

    def used(self, uid: int) -> None:
        """Record durably that a uid is used."""
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{uid + 1}\n".encode(), 0)
        os.fsync(self._fd)


@contextlib.contextmanager
def _search(layout: Layout) -> Iterator[Callable[[], frozenset[int]]]:
    """Search world-writable folders for files of the range, by find(1), which does not follow links.

    Gets a function that waits for the uids that own some.
    """
    config = layout.config.guests
    folders = [folder for folder in config.uid_check_paths if os.path.isdir(folder)]  # noqa: PTH112 - a string
    if not folders:
        yield frozenset
        return
    first, last = config.uid_base, config.uid_base + config.uid_count - 1
    test = ["-uid", f"+{first - 1}", "-uid", f"-{last + 1}", "-printf", "%U\\n"]
    pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
    try:
        finder = subprocess.Popen(
            [FIND, *folders, "-xdev", *test], stdin=nowhere, stdout=pipe, stderr=nowhere, text=True
        )
    except OSError as err:
        log.warning("cannot look for files of earlier guests in %s: %s", " ".join(folders), err)
        yield frozenset
        return

    def owners() -> frozenset[int]:
        try:
            said, _ = finder.communicate(timeout=SCAN_S)
        except subprocess.TimeoutExpired as err:
            log.warning("cannot look for files of earlier guests in %s: %s", " ".join(folders), err)
            return frozenset()
        return frozenset(int(line) for line in said.split() if line.isdigit())

    with finder:
        try:
            yield owners
        finally:
            finder.kill()


def release(layout: Layout, uid: int, generation: str) -> None:
    """End the processes of an allocated uid, verify that they are gone, remove the allocation.

    A uid of another generation is not touched: then the journal has an entry
    whose allocation never happened.

    Raises:
        TeardownError: a process of that uid does not end.
    """
    if not held(layout, uid, generation):
        return
    for ref in process.of_uid(uid):
        process.end(ref)
    left = next(process.of_uid(uid), None)
    if left is not None:
        raise TeardownError(
            f"uid {uid} is still in use", f"by process {left.pid}", "end it, then vhpc reconcile"
        )
    (layout.uids / str(uid)).unlink(missing_ok=True)


def held(layout: Layout, uid: int, generation: str) -> bool:
    """Whether a uid is allocated to that generation; an empty allocation (left by a crash) counts too."""
    try:
        return (layout.uids / str(uid)).read_text() in ("", generation)
    except FileNotFoundError:
        return False


def allocated(layout: Layout) -> Iterator[tuple[int, str]]:
    """All allocations: (uid, generation)."""
    with contextlib.suppress(FileNotFoundError):
        for path in sorted(layout.uids.iterdir()):
            with contextlib.suppress(FileNotFoundError):
                if path.name.isdecimal():
                    yield int(path.name), path.read_text()


def in_range(config: Config, uid: int) -> bool:
    """Whether a uid is in the range for guests."""
    base = config.guests.uid_base
    return base <= uid < base + config.guests.uid_count


def uid_range(config: Config, subuid: Path) -> Iterator[CheckResult]:
    """Whether the uids of QEMU are unused, by users and by rootless containers."""
    first, count = config.guests.uid_base, config.guests.uid_count
    last = first + count - 1
    hint = "choose another guests.uid_base, the same on all nodes"
    owners = [entry.pw_name for entry in pwd.getpwall() if first <= entry.pw_uid <= last]
    owners += [name for uid in (first, last) if (name := _name_of(uid)) and name not in owners]
    if owners:
        yield error("node.uids", f"uids {first}-{last} are not free: {', '.join(owners[:5])}", hint)
        return
    try:
        lines = subuid.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        match = _SUBUID.match(line)
        if match and int(match[1]) <= last and int(match[1]) + int(match[2]) > first:
            yield error("node.uids", f"uids {first}-{last} overlap {subuid}: {line.strip()}", hint)
            return
    yield ok("node.uids", f"uids {first}-{last} are used by nothing else")


def qemu_group(config: Config) -> CheckResult:
    """Whether the group that QEMU runs with exists."""
    try:
        gid = accounts.group_id(config.guests.qemu_group)
    except VhpcError as err:
        return error("node.qemu_group", err.line(), "install QEMU, or set guests.qemu_group")
    return ok("node.qemu_group", f"{config.guests.qemu_group} is {gid}")


def _name_of(uid: int) -> str:
    """Name of a uid; directory services that do not list users answer such a request."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return ""
