# SPDX-License-Identifier: Apache-2.0
"""The sockets of vhpc web: one on the loopback address, or a Unix socket for the site's proxy."""

from __future__ import annotations

import errno
import grp
import os
import socket
import stat
from pathlib import Path

from vhpc_slurm.errors import UserError

BACKLOG = 64


def loopback(port: int) -> socket.socket:
    """Listen on 127.0.0.1; port 0 is any free one.

    Raises:
        UserError: the port is in use.
    """
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        # a port that was used a moment ago; two programs cannot listen on it by this on Linux
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(("127.0.0.1", port))
        made.listen(BACKLOG)
    except OSError as err:
        made.close()
        raise UserError(
            f"cannot listen on 127.0.0.1 port {port}", err.strerror or str(err), "choose another --port, or 0"
        ) from err
    return made


def unix(path: Path, group: str | None) -> socket.socket:
    """Listen on a Unix socket that this user and ``group`` may open.

    The mode is set before the first connection is possible.  A socket that a killed
    vhpc web has left is replaced.

    Raises:
        UserError: there is no such group, the folder may be changed by others, another program
            listens, or the path is no socket.
    """
    gid = _gid(group)
    _check_folder(path)
    _remove_old(path)
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)
    try:
        made.bind(str(path))
    except OSError as err:
        made.close()
        raise UserError(f"cannot create the socket {path}", err.strerror or str(err)) from err
    finally:
        os.umask(mask)
    try:
        if gid is not None:
            os.chown(path, -1, gid, follow_symlinks=False)
            path.chmod(0o660)
        made.listen(BACKLOG)  # connections are refused until here
    except OSError as err:
        made.close()
        path.unlink(missing_ok=True)
        raise UserError(
            f"cannot give the socket {path} to group {group}",
            err.strerror or str(err),
            "this user must be a member of the group",
        ) from err
    return made


def _gid(group: str | None) -> int | None:
    if group is None:
        return None
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise UserError(
            f"there is no group {group!r}", "", "--socket-group names the group of the proxy"
        ) from None


def _check_folder(path: Path) -> None:
    """Others may not replace the socket, on no level of its path."""
    if not path.is_absolute() or ".." in path.parts:
        raise UserError(f"{path} is not an absolute path", "", "like /run/vhpc-web/socket")
    for folder in path.parents:
        try:
            found = folder.lstat()
        except OSError as err:
            raise UserError(f"cannot use the folder {folder}", err.strerror or str(err)) from err
        if not stat.S_ISDIR(found.st_mode):
            raise UserError(f"{folder} is not a folder", "links are not followed")
        if found.st_uid not in (0, os.geteuid()) or found.st_mode & 0o022:
            raise UserError(
                f"others may change the folder {folder}",
                f"it belongs to uid {found.st_uid}, its mode is {stat.S_IMODE(found.st_mode):04o}",
                "the unit vhpc-web.service makes /run/vhpc-web",
            )


def _remove_old(path: Path) -> None:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise UserError(f"{path} exists and is not a socket", "", "remove it, or choose another --socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(2)
        try:
            probe.connect(str(path))
        except OSError as err:
            if err.errno == errno.ECONNREFUSED:
                path.unlink()
            return
            raise UserError(f"cannot use the socket {path}", err.strerror or str(err)) from err
    raise UserError(f"another program listens on {path}", "", "is vhpc-web.service running?")
