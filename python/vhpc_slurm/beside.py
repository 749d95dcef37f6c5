# SPDX-License-Identifier: Apache-2.0
"""Work on pieces of data in a thread, beside the caller's own; hashlib does not hold Python's lock."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self


class Beside:
    """Gives pieces to a function in a thread, one after the other; at most one waits.

    A context, or to be closed: at its end the function has taken all pieces, and an error of it is raised.
    """

    def __init__(self, take: Callable[[bytes | memoryview], None]) -> None:
        self._take = take
        self._thread = ThreadPoolExecutor(1)
        self._last: Future[None] | None = None

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the thread."""
        self.close()

    def put(self, data: bytes | memoryview) -> None:
        """Add a piece, which must not change until the next call has returned.

        Raises:
            Exception: what the function raised for an earlier piece.
        """
        self.wait()
        self._last = self._thread.submit(self._take, data)

    def wait(self) -> None:
        """Return when the function has taken all pieces; raises as ``put`` does."""
        if self._last is not None:
            self._last.result()

    def close(self) -> None:
        """The same, and end the thread."""
        self._thread.shutdown()
        self.wait()
