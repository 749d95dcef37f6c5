# SPDX-License-Identifier: Apache-2.0
"""Work on pieces of data in a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from pace import limit
from vhpc_slurm.beside import Beside


def test_pieces_are_taken_in_order_and_all() -> None:
    taken: list[bytes | memoryview] = []
    with Beside(taken.append) as beside:
        for number in range(300):
            beside.put(b"%d" % number)
    assert taken == [b"%d" % number for number in range(300)]


def test_one_piece_at_most_waits() -> None:
    may_go_on, second = threading.Event(), threading.Event()

    def wait(_: bytes | memoryview) -> None:
        may_go_on.wait(limit(10))

    with Beside(wait) as beside:
        beside.put(b"1")

        def put_second() -> None:
            beside.put(b"2")
            second.set()

        caller = threading.Thread(target=put_second)
        caller.start()
        assert not second.wait(0.2)
        may_go_on.set()
        assert second.wait(limit(10))
        caller.join()


def put(take: Callable[[bytes | memoryview], None], pieces: int, then: str = "") -> None:
    with Beside(take) as beside:
        for _ in range(pieces):
            beside.put(b"x")
        if then:
            raise ValueError(then)


@pytest.mark.parametrize("pieces", [1, 2])
def test_an_error_of_the_function_reaches_the_caller(pieces: int) -> None:
    def full(_: bytes | memoryview) -> None:
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        put(full, pieces)


def test_an_error_of_the_caller_ends_the_thread() -> None:
    before = threading.active_count()
    with pytest.raises(ValueError, match="mine"):
        put(lambda _: None, 1, then="mine")
    assert threading.active_count() == before
