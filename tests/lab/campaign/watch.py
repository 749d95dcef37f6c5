# SPDX-License-Identifier: Apache-2.0
"""Slurm's state of jobs and nodes, second by second, from the start of a campaign to its end."""

from __future__ import annotations

import re
import subprocess
import threading
import time
from dataclasses import dataclass, field

from cluster import VLAB

ENDED = frozenset(
    {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"}
)
# a mark after each answer: an empty queue is not a slurmctld that does not answer
_ASK = """
while sleep 1; do
    if jobs=$(timeout 5 squeue -h -a -r -t all -O "Name:40,JobArrayID:24,JobID:12,State:14,RestartCnt:6,\
exit_code:10,NodeList:20,Reason:60") && nodes=$(timeout 5 sinfo -h -N -o "node %N %T %E"); then
        printf '%s\\n%s\\n=\\n' "$jobs" "$nodes"
    fi
done
"""
_WIDTHS = (40, 24, 12, 14, 6, 10, 20, 60)


@dataclass(frozen=True)
class Seen:
    """A job, or an element of an array, as it was at a time (seconds, monotonic)."""

    at: float
    job: int
    state: str
    restarts: int
    code: str
    nodes: tuple[str, ...]
    reason: str


@dataclass
class Track:
    """One job's changes in the order in which they were seen; ``last`` is when it was seen last."""

    seen: list[Seen] = field(default_factory=list)
    last: float = 0.0

    @property
    def now(self) -> Seen:
        """Its newest state."""
        return self.seen[-1]

    @property
    def ended(self) -> bool:
        """Whether nothing more will come of it."""
        return self.now.state in ENDED

    @property
    def ids(self) -> frozenset[int]:
        """All ids that it had."""
        return frozenset(seen.job for seen in self.seen)

    def spans(self, node: str | None = None) -> list[tuple[float, float]]:
        """When it was (on a node), as (from, until)."""
        ends = [*(seen.at for seen in self.seen[1:]), self.last + (0 if self.ended else 1e9)]
        return [
            (seen.at, end)
            for seen, end in zip(self.seen, ends, strict=True)
            if seen.state not in ENDED and (node is None or node in seen.nodes)
        ]


@dataclass(frozen=True)
class Trouble:
    """A node that was drained or down, and why, as it was first seen."""

    at: float
    node: str
    state: str
    reason: str


class Watch:
    """A thread that reads squeue and sinfo."""

    def __init__(self) -> None:
        self.tracks: dict[tuple[str, int], Track] = {}
        """By the job's name and its array index (0 for jobs that are none)."""
        self.nodes: dict[str, tuple[str, str]] = {}
        """State and reason of each node."""
        self.troubles: list[Trouble] = []
        self.heard = 0.0
        """When slurmctld has answered last."""
        self.queue: frozenset[tuple[str, int]] = frozenset()
        """The jobs that slurmctld knew then."""
        self._before = frozenset(
            subprocess.run(
                [VLAB, "exec", "ctl", "--", "squeue", "-h", "-a", "-r", "-t", "all", "-O", "JobID:12"],
                stdout=subprocess.PIPE, text=True, check=True, timeout=60,
            ).stdout.split()
        )  # fmt: skip
        """Ids of jobs of an earlier campaign, whose names may be the same."""
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [VLAB, "exec", "ctl", "--", "sh", "-c", _ASK], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the watch."""
        self._process.terminate()
        self._process.wait(20)
        self._thread.join(20)

    def of_job(self, job_id: int) -> tuple[str, int] | None:
        """The key of the job that has an id, or had it last."""
        with self._lock:
            found = [(track.last, key) for key, track in self.tracks.items() if job_id in track.ids]
        return max(found)[1] if found else None

    def alive(self) -> list[tuple[tuple[str, int], Seen]]:
        """The jobs in slurmctld's last answer that had not ended."""
        with self._lock:
            return sorted((key, self.tracks[key].now) for key in self.queue if not self.tracks[key].ended)

    def fresh(self, since: float, timeout: float = 120) -> None:
        """Wait for an answer to a question that was asked after a time."""
        until = time.monotonic() + timeout
        while self.heard < since + 1.5:
            assert time.monotonic() < until, "slurmctld does not answer"
            time.sleep(0.2)

    def _read(self) -> None:
        assert self._process.stdout is not None
        lines: list[str] = []
        for raw in self._process.stdout:
            line = raw.decode(errors="replace").rstrip("\n")
            if line == "=":
                with self._lock:
                    self._take(lines, time.monotonic())
                lines = []
            else:
                lines.append(line)

    def _take(self, lines: list[str], now: float) -> None:
        queue = set()
        for line in lines:
            if line.startswith("node "):
                self._take_node(line, now)
                continue
            name, element, job, state, restarts, code, nodes, reason = _cut(line)
            if not re.fullmatch(r"c\d+-.*", name) or job in self._before:
                continue  # not of this campaign
            index = element.partition("_")[2]
            key = (name, int(index or 0))
            queue.add(key)
            seen = Seen(now, int(job), state, int(restarts), exit_code(code), node_names(nodes), reason)
            track = self.tracks.setdefault(key, Track())
            track.last = now
            if not track.seen or track.now != Seen(track.now.at, *_rest(seen)):
                track.seen.append(seen)
        self.queue = frozenset(queue)
        self.heard = now

    def _take_node(self, line: str, now: float) -> None:
        _, node, state, reason = line.split(" ", 3)
        before = self.nodes.get(node)
        self.nodes[node] = (state, reason)
        if is_trouble(state) and (before is None or not is_trouble(before[0]) or before[1] != reason):
            self.troubles.append(Trouble(now, node, state, reason))


def is_trouble(state: str) -> bool:
    """Whether a node in that state (of sinfo) takes no jobs for a reason."""
    return state.startswith(("drain", "down", "fail"))


def node_names(text: str) -> tuple[str, ...]:
    """The nodes of a list as squeue prints it, such as n[1-2,4]."""
    if "[" not in text:
        return tuple(text.split(",")) if text else ()
    stem, _, ranges = text.removesuffix("]").partition("[")
    names: list[str] = []
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        names += [f"{stem}{number}" for number in range(int(first), int(last or first) + 1)]
    return tuple(names)


def exit_code(text: str) -> str:
    """CODE:SIGNAL; squeue of 22.05 shows what wait(2) has said, as one number."""
    if not text.isdigit():
        return text
    status = int(text)
    return f"{status >> 8 & 0xFF}:{status & 0x7F}"


def _rest(seen: Seen) -> tuple[int, str, int, str, tuple[str, ...], str]:
    return seen.job, seen.state, seen.restarts, seen.code, seen.nodes, seen.reason


def _cut(line: str) -> list[str]:
    """The columns of a row."""
    cells = []
    for width in _WIDTHS:
        cells.append(line[:width].strip())
        line = line[width:]
    return cells
