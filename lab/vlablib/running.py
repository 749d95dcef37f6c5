# SPDX-License-Identifier: Apache-2.0
"""Finds the lab's running hosts."""

from __future__ import annotations

import os
from pathlib import Path

from vlablib.report import LabError
from vlablib.settings import Lab

INIT = Path(__file__).with_name("hostinit.py")
"""The program that is PID 1 of the lab, and of each host."""


_known: dict[str, int] = {}


def find(lab: Lab) -> dict[str, int]:
    """Return the pids of the lab's running PID 1 processes by name: "lab", "ctl", "n1", …"""
    pids = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return {name: pid for pid in pids if (name := _name(lab, pid))}


def _name(lab: Lab, pid: int) -> str:
    """The name of a PID 1 of the lab; empty if the process is none."""
    entry = Path(f"/proc/{pid}")
    try:
        words = (entry / "cmdline").read_bytes().split(b"\0")
        # python3 INIT KIND NAME STATE; a zombie has an empty command line
        if len(words) != 6 or os.fsdecode(words[4]) != str(lab.state) or entry.stat().st_uid:
            return ""
    except OSError:
        return ""  # it has just ended
    is_init = words[1].endswith(b"vlab-init") or os.fsdecode(words[1]).endswith("/" + INIT.name)
    return words[3].decode() if is_init else ""


def remember(lab: Lab) -> None:
    """Have `find_host`, here and in children, look at no other process while hosts run as before.

    A process that runs many commands calls it before each: there may be a thousand other processes.
    """
    if not _known or any(_name(lab, pid) != name for name, pid in _known.items()):
        _known.clear()
        _known.update(find(lab))
        _known.pop("lab", None)


def find_host(lab: Lab, name: str) -> int:
    """Return the pid of a host's PID 1.

    Raises:
        LabError: the lab has no such host, or it does not run.
    """
    if name in _known and _name(lab, _known[name]) == name:
        return _known[name]
    pids = find(lab)
    pids.pop("lab", None)
    if name in pids:
        return pids[name]
    running = f"running: {', '.join(sorted(pids))}" if pids else "the lab is down; run: vlab up"
    raise LabError(f"there is no host {name}; {running}")
