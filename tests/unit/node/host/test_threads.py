# SPDX-License-Identifier: Apache-2.0
"""Calls that are given up when their time is over."""

from __future__ import annotations

import threading

import pytest

from vhpc_slurm.node.host import threads


def test_a_call_gives_its_value_or_its_error() -> None:
    assert threads.within(5, "value", lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        threads.within(5, "error", lambda: 1 // 0)


def test_a_call_without_an_answer_is_given_up() -> None:
    with pytest.raises(threads.OverdueError):
        threads.within(0.01, "silent", threading.Event().wait)


def test_an_error_of_the_watch_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the end of QEMU ends the wait for libvirt."""
    monkeypatch.setattr(threads, "WATCH_S", 0.001)
    answer = threading.Event()

    def watch() -> None:
        answer.set()
        raise LookupError

    with pytest.raises(LookupError):
        threads.within(60, "watched", answer.wait, watch)
