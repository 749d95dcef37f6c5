# SPDX-License-Identifier: Apache-2.0
"""The database thread.

Calls that wait at the same time share a commit: a thousand nodes that take their lease
cost the disk a few writes, not a thousand. A future completes only when its change is
durable.
"""

from __future__ import annotations

import logging
import queue
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from vhpc_slurm.controller.store.port import LeaseStore
from vhpc_slurm.errors import FabricError

log = logging.getLogger("vhpcd")

MOST = 256
"""The most calls that share a commit."""
TELL_S = 60.0
"""Seconds between two log lines about an unusable database; each client gets the error."""

Result = TypeVar("Result")
_Call = tuple[Callable[..., Any], tuple[Any, ...], "Future[Any]"]


class Writer:
    """Runs calls one after the other; each is all or nothing, and durable when its future says so."""

    def __init__(self, store: LeaseStore) -> None:
        self._store = store
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._told = float("-inf")
        self._thread = threading.Thread(target=self._run, name="leases", daemon=True)
        self._thread.start()

    def submit(self, call: Callable[..., Result], *arguments: Any) -> Future[Result]:
        """Queue a call; the future gets what the call returns or raises."""
        future: Future[Result] = Future()
        self._calls.put((call, arguments, future))
        return future

    def close(self) -> None:
        """Run the queued calls, and end the thread."""
        self._calls.put(None)
        self._thread.join()

    def _run(self) -> None:
        ends = False
        while not ends:
            batch: list[_Call] = []
            found = self._calls.get()
            while found is not None:
                batch.append(found)
                if len(batch) >= MOST or self._calls.empty():
                    break
                found = self._calls.get()
            ends = found is None
            if batch:
                self._do(batch)

    def _trouble(self, err: sqlite3.Error) -> FabricError:
        found = self._store.explain(err)
        now = time.monotonic()
        if now - self._told >= TELL_S:
            self._told = now
            log.critical("%s", found.line())
        return found

    def _do(self, batch: list[_Call]) -> None:
        done: list[tuple[Future[Any], Any, BaseException | None]] = []
        try:
            with self._store.transaction():
                for call, arguments, future in batch:
                    if not future.set_running_or_notify_cancel():
                        continue
                    try:
                        done.append((future, call(*arguments), None))
                    except sqlite3.Error as err:
                        done.append((future, None, self._trouble(err)))
                    except Exception as err:  # it belongs to the caller, who waits for the future
                        done.append((future, None, err))
        except FabricError as err:
            # The commit failed: no call of this batch has happened.
            known = {id(future) for future, _, _ in done}
            waiting = [one for _, _, one in batch if id(one) in known or one.set_running_or_notify_cancel()]
            done = [(future, None, err) for future in waiting]
        for future, result, error in done:
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)
