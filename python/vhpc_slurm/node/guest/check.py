# SPDX-License-Identifier: Apache-2.0
"""The site's check of guests: a command that runs in each guest before its job starts, and who is at fault.

The node is at fault only if the check is trustworthy: the image and the contents of the guest are the site's.
Otherwise a user could have nodes drained: by a program of an own image, or by a variable such as LD_PRELOAD.
"""
# Decision: A check in guests drains nodes, except in what the user has changed

from __future__ import annotations

import errno
import threading
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

from vhpc_slurm.config import Guests
from vhpc_slurm.errors import NodeError, UserError, VhpcError
from vhpc_slurm.model import Lease, RunningGuest
from vhpc_slurm.node.guest.channel import ROOT_SOCKET, ChannelError
from vhpc_slurm.node.guest.program import NotStartedError, ProgramChannel, ProgramEnd

JOBS_FAULT = frozenset({78, 126, 127})
"""Exit codes: EX_CONFIG of sysexits.h, and those of a shell that cannot run, or find, a program."""
ASK_S = 5.0
"""The caller is asked at this interval whether the job still exists."""
LINES = 2
"""Lines at the end of the check's output that its message has."""
CONNECT_S = 10.0
USERS_PARTS = (
    ("env", "--vhpc-env"),
    ("mounts", "--vhpc-mount"),
    ("disk_mount", "--vhpc-disk with a mount point"),
    ("start_dir", "--vhpc-workdir"),
)
"""Fields of a request by which its user changes what root's programs find in a guest, and their options."""


class UnhealthyError(NodeError):
    """The site's check has failed in a guest of the site's own image: the node is at fault."""


def users_part(lease: Lease) -> str:
    """The user's part in what the check finds in the guests; empty if it is only the site's."""
    assert lease.image is not None
    if lease.image.ref.own:
        return f"image {lease.image.ref}"
    return ", ".join(option for field, option in USERS_PARTS if getattr(lease.request, field))


def judge(settings: Guests, hostname: str, end: ProgramEnd, users: str) -> UserError | UnhealthyError | None:
    """Decide who is at fault; None if the guest is well.

    Args:
        settings: with the command and its deadline.
        hostname: of the guest.
        end: how the check has ended.
        users: of ``users_part``.
    """
    if end.code == 0:
        return None
    if end.timed_out:
        why = f"it did not end within {settings.check_timeout_s} s"
    else:
        why = f"exit code {end.code}" if end.signal is None else f"it was ended by signal {end.signal}"
    what = f"the check of guest {hostname} failed"
    why = ": ".join(filter(None, (why, end.last_lines(LINES))))
    command = " ".join(settings.check)
    if end.oom_killed:
        return UserError(what, f"{command} had not enough memory: {why}", "ask for more: --mem")
    if users:
        return UserError(what, why, f"the site's command {command} ran, and depends on {users}")
    if end.code in JOBS_FAULT:
        return UserError(what, why, f"the site's command {command} ran; tell the site's support")
    return UnhealthyError(what, why, command)


def run(
    settings: Guests, lease: Lease, guests: Sequence[RunningGuest], env: Mapping[str, str]
) -> Generator[None, None, tuple[str, ...]]:
    """Check all guests of a node at once; a generator that returns lines for the job's report.

    Yields every ``ASK_S`` seconds, so that the caller can see whether the job still exists: what it throws in
    there ends the checks.

    Raises:
        UserError: the job is at fault, or that cannot be excluded.
        UnhealthyError: the node is at fault.
    """
    stop = threading.Event()
    users = users_part(lease)
    with ThreadPoolExecutor(len(guests)) as pool:
        checks = [pool.submit(_check, settings, guest, env, users, stop) for guest in guests]
        try:
            while wait(checks, ASK_S).not_done:
                yield
        finally:
            stop.set()
    found = [check.result() for check in checks]
    errors = [one for one in found if isinstance(one, VhpcError)]
    for error in sorted(errors, key=lambda one: not isinstance(one, UnhealthyError)):
        raise error
    return tuple(dict.fromkeys(one for one in found if isinstance(one, str)))


def _check(
    settings: Guests, guest: RunningGuest, env: Mapping[str, str], users: str, stop: threading.Event
) -> UserError | UnhealthyError | str | None:
    """Check one guest; returns the error, or a line for the report, or None."""
    program, hostname = settings.check[0], guest.plan.hostname
    failed = f"guest {hostname} could not be checked"
    try:
        with ProgramChannel.connect(Path(guest.plan.paths.run_dir) / ROOT_SOCKET, CONNECT_S) as channel:
            end = channel.run(settings.check, env, settings.check_timeout_s, stop)
    except NotStartedError as err:
        if err.errno in (errno.ENOENT, errno.ENOTDIR):
            return f"guest {hostname} was not checked: its image has no {program}, or not its interpreter"
        return UserError(failed, err.line(), f"{program} in the image is the site's check")
    except (ChannelError, NodeError) as err:  # it was set up a moment ago: the node is well
        return UserError(failed, f"it does not answer its node any more: {err.line()}")
    return judge(settings, hostname, end, users)
