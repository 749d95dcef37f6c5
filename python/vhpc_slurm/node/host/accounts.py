# SPDX-License-Identifier: Apache-2.0
"""The job user's account from the node's name service, as a guest's passwd and group files can have it."""

from __future__ import annotations

import grp
import os
import pwd
import re

from vhpc_slurm.errors import NodeError, UserError
from vhpc_slurm.node.host.process import Credentials
from vhpc_slurm.record import Record

_UNWRITABLE = re.compile(r"[\x00-\x1f\x7f:]")
"""Characters that end a field of passwd(5) and group(5), or its line."""


class Account(Record, frozen=True):
    """A user with the data for the guest's passwd and group files.

    ``groups`` are (name, gid), the primary group included.  A group has an empty name if it has none on the
    node, or one that group(5) cannot hold.
    """

    name: str
    uid: int
    gid: int
    gecos: str
    home: str
    shell: str
    groups: tuple[tuple[str, int], ...]

    @property
    def credentials(self) -> Credentials:
        """The rights of the helpers of this user's job."""
        return Credentials(self.uid, self.gid, tuple(gid for _, gid in self.groups))


def account(uid: int) -> Account:
    """Look a user up.

    Raises:
        UserError: the user is root (the guest would have access to root's files).
        NodeError: the name service does not know the uid.
    """
    if uid == 0:
        raise UserError(
            "jobs of root do not run in guests",
            "the guest would have access to root's files",
            "submit as another user",
        )
    try:
        entry = pwd.getpwuid(uid)
    except KeyError:
        raise NodeError(
            f"uid {uid} is unknown on this node", "", "check nsswitch.conf and the directory"
        ) from None
    gids = os.getgrouplist(entry.pw_name, entry.pw_gid)
    return Account(
        name=entry.pw_name,
        uid=uid,
        gid=entry.pw_gid,
        gecos=_UNWRITABLE.sub(" ", entry.pw_gecos),
        home=entry.pw_dir or "/",
        shell=entry.pw_shell,
        groups=tuple((_group_name(gid), gid) for gid in gids),
    )


def group_id(name: str) -> int:
    """Number of a group; NodeError when the node has no such group."""
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise NodeError(
            f"group {name!r} is unknown on this node",
            "guests.qemu_group names it",
            "install QEMU or correct vhpc.toml",
        ) from None


def _group_name(gid: int) -> str:
    """The name of a group; empty if it has none, or if a line of group(5) cannot begin with it.

    glibc skips leading blanks, takes ``#`` for a comment, and ``+`` and ``-`` for entries of NIS.
    """
    try:
        name = grp.getgrgid(gid).gr_name
    except KeyError:
        return ""
    return "" if _UNWRITABLE.search(name) or name[:1] in tuple("#+- ") else name
