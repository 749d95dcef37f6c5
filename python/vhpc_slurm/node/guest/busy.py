# SPDX-License-Identifier: Apache-2.0
"""A libvirt that does not answer: for how long already, which decides whether the node is at fault.

Somebody may have filled its clients, or the node may be overloaded for a moment: the job is requeued and
operators get an alarm.  The node is drained only if it continues.
"""

from __future__ import annotations

import json
from contextlib import suppress

from vhpc_slurm import files
from vhpc_slurm.node.guest.libvirtd import BusyError
from vhpc_slurm.node.store import statefile
from vhpc_slurm.node.store.layout import Layout

PERSISTS_S = 300.0
"""A libvirt that has not answered for so long keeps this node from starting guests."""
NEWS_S = 900.0
"""An older failure says nothing of the next one: nothing has asked libvirt in between."""


def persists(layout: Layout, error: BusyError) -> bool:
    """Note that libvirt has not answered, and return whether that has lasted for ``PERSISTS_S``."""
    now = statefile.uptime()
    first, last, _ = _read(layout)
    if not now - NEWS_S <= last <= now:
        first = now
    text = json.dumps({"first": first, "last": now, "line": error.line()})
    with suppress(OSError):  # a full file system: the next failure is the first one again
        layout.run.mkdir(mode=0o755, parents=True, exist_ok=True)
        files.replace(layout.libvirt_busy, text.encode())
    return now - first >= PERSISTS_S


def forget(layout: Layout) -> None:
    """libvirt has answered."""
    layout.libvirt_busy.unlink(missing_ok=True)


def alarm(layout: Layout) -> str:
    """The message to operators while libvirt does not answer; empty if it does."""
    _, last, line = _read(layout)
    return line if 0 <= statefile.uptime() - last <= NEWS_S else ""


def _read(layout: Layout) -> tuple[float, float, str]:
    """When libvirt did not answer for the first and the last time, in seconds since boot, and the error."""
    try:
        found = json.loads(layout.libvirt_busy.read_bytes())
        return float(found["first"]), float(found["last"]), str(found["line"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0, float("-inf"), ""
