# SPDX-License-Identifier: Apache-2.0
"""Finds the lab's running hosts."""

from __future__ import annotations

import os
from pathlib import Path

from vlablib.report import LabError
from vlablib.settings import Lab

INIT = Path(__file__).with_name("hostinit.py")
"""The program that is PID 1 of the lab, and of each host."""


def find(lab: Lab) -> dict[str, int]:
    """Return the pids of the lab's running PID 1 processes by name: "lab", "ctl", "n1", …"""
    found: dict[str, int] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            owner = entry.stat().st_uid
        except OSError:
            continue  # it has just ended
        # python3 INIT KIND NAME STATE; a zombie has an empty command line
        if owner or len(words) != 6 or os.fsdecode(words[4]) != str(lab.state):
            continue
        if words[1].endswith(b"vlab-init") or os.fsdecode(words[1]).endswith("/" + INIT.name):
            found[words[3].decode()] = int(entry.name)
    return found


def find_host(lab: Lab, name: str) -> int:
    """Return the pid of a host's PID 1.

    Raises:
        LabError: the lab has no such host, or it does not run.
    """
    pids = find(lab)
    pids.pop("lab", None)
    if name in pids:
        return pids[name]
    running = f"running: {', '.join(sorted(pids))}" if pids else "the lab is down; run: vlab up"
    raise LabError(f"there is no host {name}; {running}")
