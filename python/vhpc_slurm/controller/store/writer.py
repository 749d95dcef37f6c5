# SPDX-License-Identifier: Apache-2.0
"""The database thread.

Calls that wait at the same time share a commit: a thousand nodes that take their lease
cost the disk a few writes, not a thousand. A future completes only when its change is
durable.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from vhpc_slurm.controller.store.errors import ENGINE_ERRORS, TAKEN_ERRORS, RetryError
from vhpc_slurm.controller.store.port import LeaseStore
from vhpc_slurm.errors import FabricError

log = logging.getLogger("vhpcd")

MOST = 256
"""The most calls that share a commit."""
RETRY_S = 3.0
"""Seconds in which a batch is tried again that was undone for a reason that passes, like a deadlock."""
FIRST_PAUSE_S = 0.02
TELL_S = 60.0
"""Seconds between two log lines about an unusable database; each client gets the error."""

Result = TypeVar("Result")
_Call = tuple[Callable[..., Any], tuple[Any, ...], "Future[Any]"]


def _passes(err: FabricError) -> bool:
    """Whether the error is not logged: the call is tried again, or a constraint of a table refused a row."""
    return isinstance(err, RetryError) or isinstance(err.__cause__, TAKEN_ERRORS)


class Writer:
    """Runs calls one after the other; each is all or nothing, and durable when its future has a result."""

    def __init__(self, store: LeaseStore) -> None:
        self._store = store
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._logged = float("-inf")
        self._thread = threading.Thread(target=self._run, name="leases", daemon=True)
        self._thread.start()

    def submit(self, call: Callable[..., Result], *arguments: Any) -> Future[Result]:
        """Queue a call; the future gets what the call returns or raises."""
        future: Future[Result] = Future()
        self._calls.put((call, arguments, future))
        return future

    @property
    def waiting(self) -> int:
        """About how many calls wait."""
        return self._calls.qsize()

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

    def _told(self, found: FabricError) -> FabricError:
        now = time.monotonic()
        if now - self._logged >= TELL_S:
            self._logged = now
            log.critical("%s", found.line())
        return found

    def _do(self, batch: list[_Call]) -> None:
        live = [one for one in batch if one[2].set_running_or_notify_cancel()]
        until = time.monotonic() + RETRY_S
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                done = self._attempt(live)
            except RetryError as err:
                # No call of this batch has happened.
                if time.monotonic() + pause_s < until:
                    time.sleep(pause_s)
                    pause_s *= 2
                    continue
                done = [(None, self._told(err)) for _ in live]
            except FabricError as err:
                done = [(None, self._told(err)) for _ in live]
            break
        for (_, _, future), (result, error) in zip(live, done, strict=True):
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)

    def _attempt(self, calls: list[_Call]) -> list[tuple[Any, BaseException | None]]:
        """The result or error of each call, after the commit; FabricError if the commit failed."""
        done: list[tuple[Any, BaseException | None]] = []
        with self._store.transaction():
            for call, arguments, _ in calls:
                try:
                    done.append((call(*arguments), None))
                except ENGINE_ERRORS as err:
                    found = self._store.explain(err)
                    # A temporary error fails the transaction, which is then tried again.
                    done.append((None, found if _passes(found) else self._told(found)))
                except FabricError as err:
                    # A part of the transaction has explained its refusal by the database.
                    of_engine = isinstance(err.__cause__, ENGINE_ERRORS)
                    done.append((None, self._told(err) if of_engine and not _passes(err) else err))
                except Exception as err:  # it belongs to the caller, who waits for the future
                    done.append((None, err))
        return done
