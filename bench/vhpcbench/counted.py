# SPDX-License-Identifier: Apache-2.0
"""CPU time and memory of processes by /proc, and requests to slurmctld by sdiag(1)."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from vhpcbench.common import BenchError

TICKS = os.sysconf("SC_CLK_TCK")
_BY_TYPE = "Remote Procedure Call statistics by message type"
_REQUEST = re.compile(r"^\s+(\w+)\s+\(\s*\d+\)\s+count:(\d+)\s", re.MULTILINE)


@dataclass(frozen=True)
class ProcessTimes:
    """CPU seconds of a process, and of its children that have ended and were waited for; proc(5), stat."""

    parent: int
    own_s: float
    children_s: float

    @classmethod
    def parse(cls, text: str) -> ProcessTimes:
        """From the text of /proc/PID/stat; the program's name may have blanks and parentheses."""
        fields = text.rpartition(")")[2].split()
        user, system, of_children, system_of_children = map(int, fields[11:15])
        own, waited = (user + system) / TICKS, (of_children + system_of_children) / TICKS
        return cls(int(fields[1]), own, waited)


def all_processes() -> dict[int, ProcessTimes]:
    """All processes of this machine by pid."""
    found = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                text = Path(entry.path, "stat").read_text(encoding="utf-8", errors="replace")
            except OSError:
                continue  # it has just ended
            found[int(entry.name)] = ProcessTimes.parse(text)
    return found


def precise_s(pid: int) -> float:
    """CPU seconds of the threads of a process that have not ended, to the nanosecond; proc(5), schedstat."""
    found = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        found += int((thread / "schedstat").read_text(encoding="ascii").split()[0])
    return found / 1e9


def tree_s(processes: Mapping[int, ProcessTimes], roots: Iterable[int]) -> float:
    """CPU seconds of these processes, all their descendants, and those of them that have ended."""
    tree = descendants(processes, roots)
    return sum(processes[pid].own_s + processes[pid].children_s for pid in tree)


def descendants(processes: Mapping[int, ProcessTimes], roots: Iterable[int]) -> list[int]:
    """Pids of these processes, as far as they live, and of all their descendants."""
    children: dict[int, list[int]] = {}
    for pid, one in processes.items():
        children.setdefault(one.parent, []).append(pid)
    found = [pid for pid in roots if pid in processes]
    for pid in found:
        found += children.get(pid, [])
    return found


def memory_mib(pid: int) -> tuple[float, float]:
    """Resident memory of a process now, and its peak, in MiB; proc(5), status."""
    text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    found = {name: int(kib) / 1024 for name, kib in re.findall(r"^(Vm\w+):\s+(\d+) kB$", text, re.MULTILINE)}
    return found["VmRSS"], found["VmHWM"]


def requests(text: str) -> Counter[str]:
    """Requests by message type, from the output of sdiag.

    Raises:
        BenchError: sdiag prints something else.
    """
    _, found, rest = text.partition(_BY_TYPE)
    section = rest.partition("\n\n")[0]
    counts = Counter({name: int(count) for name, count in _REQUEST.findall(section + "\n")})
    if not found or not counts:
        raise BenchError("sdiag prints no requests by message type")
    return counts
