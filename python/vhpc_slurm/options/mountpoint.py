# SPDX-License-Identifier: Apache-2.0
"""Directories of guests at which disks and folders are mounted.

The plugin has the same rules (``spank_plugin/mountpoint.c``).
"""

from __future__ import annotations

import re
from typing import NamedTuple

MOUNT_POINT_MAX = 255
"""Bytes of a mount point."""
PLACES = ("/", "/var", "/var/lib")
"""Directories of guests on which nothing is mounted."""
TREES = (
    *("/bin", "/boot", "/dev", "/etc", "/home", "/lib", "/lib32", "/lib64", "/libx32", "/proc", "/run"),
    *("/sbin", "/sys", "/usr"),
)
"""Directories on and below which nothing is mounted: the guest's own system, and homes."""
MOUNTS_MAX = 16
"""Folders in a value of --vhpc-mount."""
OVERLAP = "one of the directories in the guest is on or below another one: they must be apart"
_SOURCE = re.compile(r"(/(?!\.{1,2}(/|\Z))[^/]+)+")
_MOUNT_POINT = re.compile(r"/|(/(?!\.{1,2}(/|\Z))[A-Za-z0-9._+-]+)+", re.ASCII)


def mount_point_refusal(path: str) -> str:
    """Why nothing can be mounted at a directory of a guest, whatever its job is, and what to do; or empty."""
    if len(path) > MOUNT_POINT_MAX or not _MOUNT_POINT.fullmatch(path):
        return (
            f"an absolute path of at most {MOUNT_POINT_MAX} letters, digits, '/', '.', '_', '+' and '-' is "
            "expected, without '.' or '..' as a part and without '/' at its end, such as /local"
        )
    if path in PLACES or any(path == tree or path.startswith(f"{tree}/") for tree in TREES):
        return "this directory belongs to the guest's system or to homes; choose another one, such as /local"
    return ""


class Mount(NamedTuple):
    """A folder of a share that guests have at a second place."""

    source: str
    target: str
    read_only: bool

    def __str__(self) -> str:
        return f"{self.source}:{self.target}{':ro' if self.read_only else ''}"


def parse_mounts(text: str) -> list[Mount]:
    """The folders of a value of --vhpc-mount; their checks are ``mounts_refusal``."""
    found = []
    for item in text.split(",") if text else []:
        source, _, rest = item.partition(":")
        target, _, access = rest.partition(":")
        found.append(Mount(source, target, access == "ro"))
    return found


def mounts_refusal(text: str) -> str | None:
    """Why a text is no list of SRC:DST[:ro]; empty if the shape is wrong, None if it is one."""
    mounts = parse_mounts(text)
    if not 0 < len(mounts) <= MOUNTS_MAX or ",".join(map(str, mounts)) != text:
        return ""
    for i, mount in enumerate(mounts):
        if not _SOURCE.fullmatch(mount.source):
            return ""
        if why := mount_point_refusal(mount.target):
            return why
        for other in mounts[:i]:
            if f"{mount.target}/".startswith(f"{other.target}/") or f"{other.target}/".startswith(
                f"{mount.target}/"
            ):
                return OVERLAP
    return None
