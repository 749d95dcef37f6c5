# SPDX-License-Identifier: Apache-2.0
"""QEMU's log, as libvirt keeps it: whether QEMU crashed, and what it said before."""

from __future__ import annotations

import os
import re

FOLDER = "/var/log/libvirt/qemu"
_TAIL = 16 * 1024
_END = re.compile(r"^\S+ \S+: shutting down, reason=(?P<reason>\w+)$", re.MULTILINE)
PROGRAM = r"qemu-(?:system-\w+|kvm)"
"""Names of QEMU's program: upstream's, and that of RHEL."""
_QEMU = re.compile(rf"^(?:\S+Z )?{PROGRAM}: (?P<words>.+)$", re.MULTILINE)


def crash(domain: str, folder: str = FOLDER) -> str | None:
    """QEMU's last words when it ended without being asked to; empty when it had none, None when it did not.

    libvirt says the same of a guest whose kernel panicked (``on_crash``), so an
    empty answer proves nothing.  Source: the log of libvirt's QEMU driver, which
    holds QEMU's stderr and a line of libvirt's own at its start and end.
    """
    try:
        fd = os.open(f"{folder}/{domain}.log", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with os.fdopen(fd, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
        text = file.read(_TAIL).decode(errors="replace")
    reasons = _END.findall(text)
    if not reasons or reasons[-1] != "crashed":
        return None
    words = _QEMU.findall(text)
    return words[-1].strip()[:300] if words else ""
