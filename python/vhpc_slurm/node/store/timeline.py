# SPDX-License-Identifier: Apache-2.0
"""Stages of a boot or a teardown with their start and end times."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec

from vhpc_slurm.model import Generation, Stage, Timeline
from vhpc_slurm.model.lease import FAILED
from vhpc_slurm.undecodable import UNDECODABLE

log = logging.getLogger("vhpc")


_BOOTED = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


def now() -> float:
    """Seconds of the Unix epoch, as if the clock was not set since this process began.

    Otherwise a stage in which the clock is set would have taken an hour, or less than nothing.
    """
    return at(time.clock_gettime(time.CLOCK_BOOTTIME))


def at(uptime_s: float) -> float:
    """The same of a moment that ``statefile.uptime`` has told."""
    return _BOOTED + uptime_s


def process_began() -> float:
    """Start time of this process in seconds of the Unix epoch, exact to a tick (10 ms), from proc(5)."""
    ticks = int(Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()[19])
    return at(ticks / os.sysconf("SC_CLK_TCK"))


class Recorder:
    """Collects stages and keeps them on disk, so that a crash loses only the current one.

    No job and no release waits for figures: where the disk is full they are kept in memory only.
    """

    def __init__(self, path: Path, generation: Generation, node: str) -> None:
        self._path = path
        self._generation = generation
        self._node = node
        self._stages: list[Stage] = list(_earlier(path, generation))
        self._doing = ("start", time.monotonic())

    @contextlib.contextmanager
    def stage(self, name: str, detail: str = "") -> Iterator[None]:
        """Measure a stage; a failed stage is kept with its error as detail."""
        began = now()
        self._doing = (name, time.monotonic())
        try:
            yield
        except BaseException as err:
            self._add(Stage(name, began, now(), f"{FAILED} {err}"))
            raise
        self._add(Stage(name, began, now(), detail))

    def note(self, name: str, began: float, ended: float | None = None, detail: str = "") -> None:
        """Add a stage that ends now or at the given time."""
        self._add(Stage(name, began, ended or now(), detail))

    def explain(self, why: str) -> None:
        """Give the last stage, which has failed, another reason."""
        last = self._stages.pop()
        self._add(replace(last, detail=f"{FAILED} {why}"))

    def failed(self) -> Stage | None:
        """The last stage, if it has failed."""
        last = self._stages[-1] if self._stages else None
        return last if last is not None and last.detail.startswith(FAILED) else None

    def doing(self) -> tuple[str, float]:
        """The last stage that began, and how many seconds ago."""
        name, since = self._doing
        return name, time.monotonic() - since

    def timeline(self) -> Timeline:
        """The recorded stages."""
        return Timeline(self._generation, self._node, tuple(self._stages))

    def _add(self, stage: Stage) -> None:
        self._stages.append(stage)
        part = self._path.with_suffix(".part")
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            part.write_bytes(msgspec.json.encode(self.timeline()))
            part.rename(self._path)
        except OSError as err:
            log.warning("the stage %s is not kept: %s", stage.name, err)
            with contextlib.suppress(OSError):
                part.unlink()


def read_timeline(path: Path) -> Timeline | None:
    """A timeline from its file; None if it does not exist or cannot be parsed."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Timeline)
    except (FileNotFoundError, *UNDECODABLE):
        return None


def prune(folder: Path, keep: int) -> None:
    """Keep only the newest ``keep`` timelines."""
    with contextlib.suppress(FileNotFoundError):
        files = sorted(folder.glob("*.json"), key=lambda p: p.stat().st_mtime)
        for path in files[: max(0, len(files) - keep)]:
            os.unlink(path)  # noqa: PTH108


def _earlier(path: Path, generation: Generation) -> tuple[Stage, ...]:
    known = read_timeline(path)
    return known.stages if known is not None and known.generation == generation else ()
