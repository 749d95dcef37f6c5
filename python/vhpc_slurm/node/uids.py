"""A uid of its own for every guest's QEMU, out of a range that belongs to vhpc.

With libvirt's shared default user one escaped guest would own all others.  A
uid is claimed by a file that names its generation, and given to nobody else
while a process of it lives.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

from vhpc_slurm.config import Config
from vhpc_slurm.errors import NodeError, TeardownError
from vhpc_slurm.node import process
from vhpc_slurm.node.layout import Layout


def claim(layout: Layout, generation: str, announce: Callable[[int], object]) -> int:
    """Claim a free uid.

    Args:
        layout: configuration and where claims lie.
        generation: who claims.
        announce: called with the uid before it is claimed (journal first).

    Raises:
        NodeError: the range is used up.
    """
    config = layout.config.guests
    layout.uids.mkdir(mode=0o700, parents=True, exist_ok=True)
    for uid in range(config.uid_base, config.uid_base + config.uid_count):
        path = layout.uids / str(uid)
        if path.exists() or next(process.of_uid(uid), None) is not None:
            continue
        announce(uid)
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            continue  # another job's Prolog was quicker; its claim is not ours to release
        with os.fdopen(fd, "w") as out:
            out.write(generation)
        return uid
    raise NodeError("no free uid for a guest", f"all {config.uid_count} are in use", "raise guests.uid_count")


def release(layout: Layout, uid: int, generation: str) -> None:
    """End what still runs under a claimed uid, see it gone, drop the claim.

    A uid that another generation claims is left alone: the release is of an
    announcement whose claim never came to be.

    Raises:
        TeardownError: a process of that uid does not die.
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
    """Whether a uid is claimed by that generation; a claim that a crash left empty is anybody's."""
    try:
        return (layout.uids / str(uid)).read_text() in ("", generation)
    except FileNotFoundError:
        return False


def claims(layout: Layout) -> Iterator[tuple[int, str]]:
    """All claims: (uid, generation)."""
    with contextlib.suppress(FileNotFoundError):
        for path in sorted(layout.uids.iterdir()):
            with contextlib.suppress(FileNotFoundError):
                yield int(path.name), path.read_text()


def in_range(config: Config, uid: int) -> bool:
    """Whether a uid belongs to the range of guests."""
    base = config.guests.uid_base
    return base <= uid < base + config.guests.uid_count
