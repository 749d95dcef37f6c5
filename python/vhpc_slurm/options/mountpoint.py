# SPDX-License-Identifier: Apache-2.0
"""Directories of guests at which a disk can be mounted.

The plugin has the same rules (``spank_plugin/mountpoint.c``).
"""

from __future__ import annotations

import re

MOUNT_POINT_MAX = 255
"""Bytes of a mount point."""
PLACES = ("/", "/var", "/var/lib")
"""Directories of guests on which no disk is mounted."""
TREES = (
    *("/bin", "/boot", "/dev", "/etc", "/home", "/lib", "/lib32", "/lib64", "/libx32", "/proc", "/run"),
    *("/sbin", "/sys", "/usr"),
)
"""Directories on and below which no disk is mounted: the guest's own system, and homes."""
_MOUNT_POINT = re.compile(r"/|(/(?!\.{1,2}(/|\Z))[A-Za-z0-9._+-]+)+", re.ASCII)


def mount_point_refusal(path: str) -> str:
    """Why no disk can be mounted at a directory of a guest, whatever its job is, and what to do; or empty."""
    if len(path) > MOUNT_POINT_MAX or not _MOUNT_POINT.fullmatch(path):
        return (
            f"an absolute path of at most {MOUNT_POINT_MAX} letters, digits, '/', '.', '_', '+' and '-' is "
            "expected, without '.' or '..' as a part and without '/' at its end, such as /local"
        )
    if path in PLACES or any(path == tree or path.startswith(f"{tree}/") for tree in TREES):
        return "this directory belongs to the guest's system or to homes; choose another one, such as /local"
    return ""
