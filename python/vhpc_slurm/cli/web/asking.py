# SPDX-License-Identifier: Apache-2.0
"""Questions to vhpcd, each asked once for all tabs of a viewer, in threads, with a limited wait.

An answer is kept with its time: if vhpcd does not answer, the last one is shown with its age.
Answers belong to one viewer and are never given to another.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from vhpc_slurm.errors import VhpcError

log = logging.getLogger("vhpc")

THREADS = 8
KEPT = 512
"""Answers that are remembered, of all viewers."""
FRESH_S, AGAIN_S = 2.0, 4.0
"""Seconds until a question is asked again, and after one that failed."""
WAIT_S = 3.0
"""How long a page waits for an answer before it shows an earlier one, or none."""

Value = TypeVar("Value")


@dataclass(frozen=True)
class Answer(Generic[Value]):
    """The last answer and its age.

    Attributes:
        value: the last answer; None: there has been none.
        age_s: its age in seconds.
        problem: why there is no newer answer; empty if the answer is fresh.
    """

    value: Value | None
    age_s: float = 0.0
    problem: str = ""


@dataclass
class _Entry:
    value: Any = None
    got: float = 0.0
    due: float = 0.0
    problem: str = ""
    task: asyncio.Future[None] | None = field(default=None, repr=False)


class Asker:
    """Belongs to the event loop; the questions run in threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, wait_s: float = WAIT_S) -> None:
        """``clock`` never jumps."""
        self._clock = clock
        self._wait_s = wait_s
        self._entries: OrderedDict[tuple[object, ...], _Entry] = OrderedDict()
        self._threads = ThreadPoolExecutor(THREADS, "vhpcd")

    async def ask(
        self,
        key: tuple[object, ...],
        question: Callable[[], Value],
        fresh_s: Callable[[Value], float] = lambda _: FRESH_S,
    ) -> Answer[Value]:
        """The answer to a question, asked again if it is older than ``fresh_s`` of the last answer.

        Args:
            key: names viewer and question.
            question: blocks; may raise VhpcError.
            fresh_s: how many seconds an answer is fresh.
        """
        entry = self._entries.setdefault(key, _Entry())
        self._entries.move_to_end(key)
        if entry.task is None and self._clock() >= entry.due:
            entry.task = asyncio.ensure_future(self._fetch(entry, question, fresh_s))
        self._forget()
        if entry.task is not None:
            await asyncio.wait({entry.task}, timeout=self._wait_s)
        problem = entry.problem
        if entry.task is not None and not problem:
            problem = f"vhpcd has not answered for {self._wait_s:g} s"
        return Answer(entry.value, max(0.0, self._clock() - entry.got), problem)

    async def _fetch(
        self, entry: _Entry, question: Callable[[], Value], fresh_s: Callable[[Value], float]
    ) -> None:
        try:
            value = await asyncio.get_running_loop().run_in_executor(self._threads, question)
            entry.value, entry.got, entry.problem = value, self._clock(), ""
            entry.due = self._clock() + fresh_s(value)
        except VhpcError as err:
            entry.problem, entry.due = err.line(), self._clock() + AGAIN_S
        except Exception as err:  # a page must say it, and the next question may be answered
            log.exception("internal error")
            entry.problem, entry.due = f"internal error: {err!r}", self._clock() + AGAIN_S
        finally:
            entry.task = None

    def _forget(self) -> None:
        """Remove the answers that have not been asked for longest; questions that run are kept."""
        spare = len(self._entries) - KEPT
        for key in [key for key, entry in self._entries.items() if entry.task is None][: max(0, spare)]:
            del self._entries[key]

    def close(self) -> None:
        """Let the threads end."""
        self._threads.shutdown(wait=False, cancel_futures=True)
