# SPDX-License-Identifier: Apache-2.0
"""Labels of SELinux: of sockets that QEMU may connect to, and of the host's folders.

SELinux compares the label of QEMU with that of the process that made a listening socket, so a socket that a
hook makes for a helper gets the helper's label.  packaging/rpm/selinux has the policy.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HELPER = "system_u:system_r:vhpc_helper_t:s0"
FILESYSTEM = Path("/sys/fs/selinux")
"""Is empty without SELinux."""
SOCKETS = Path("/proc/thread-self/attr/sockcreate")
"""Label of the sockets that this thread makes (selinux(8), setsockcreatecon(3))."""
ATTRIBUTE = "security.selinux"


def enforcing() -> bool | None:
    """Whether SELinux refuses what its policy does not allow; None if it is off."""
    try:
        return (FILESYSTEM / "enforce").read_text(encoding="ascii").strip() == "1"
    except OSError:
        return None


def type_of(path: str | Path) -> str:
    """The type in the label of a file; empty if it has none."""
    try:
        label = os.getxattr(path, ATTRIBUTE)
    except OSError:
        return ""
    parts = label.rstrip(b"\0").decode("ascii", "replace").split(":")
    return parts[2] if len(parts) > 2 else ""


@contextmanager
def sockets_of_helpers() -> Iterator[None]:
    """Sockets that this thread makes meanwhile have the label of helpers, if the policy has it."""
    if enforcing() is None:
        yield
        return
    try:
        SOCKETS.write_bytes(HELPER.encode("ascii") + b"\0")
    except OSError:
        # The policy lacks vhpc's module: a site may have rules of its own, and vhpc doctor warns.
        yield
        return
    try:
        yield
    finally:
        SOCKETS.write_bytes(b"\0")
