# SPDX-License-Identifier: Apache-2.0
"""A boot waits for its guest as long as its deadline and its job allow."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace
from typing import Any

import pytest

from vhpc_slurm.errors import UserError
from vhpc_slurm.node.boot import agent
from vhpc_slurm.node.boot.helpers import Helpers
from vhpc_slurm.node.guest.channel import ChannelError, ChannelSilentError
from vhpc_slurm.node.host import process
from vhpc_slurm.node.store.journal import Stopped


class Guest:
    """A channel whose agent says hello after so many waits, or never."""

    def __init__(self, silent: float, error: type[ChannelError] = ChannelSilentError) -> None:
        self.silent, self.error = silent, error
        self.waits: list[float] = []

    def hello(self, timeout_s: float) -> None:
        self.waits.append(timeout_s)
        if len(self.waits) <= self.silent:
            raise self.error("the guest's agent does not answer", "deadline passed")


def hear(guest: Guest, answers: list[bool], left_s: float = 100.0, *, stopped: bool = False) -> None:
    """Wait for the guest as Prolog does; each answer says whether the job has ended by then."""

    def disturbed(ending_s: float) -> UserError | None:
        assert ending_s == 0.0, "the guest may answer meanwhile"
        return UserError("a helper was stopped") if stopped else None

    helpers: Any = SimpleNamespace(disturbed=disturbed)
    channel: Any = guest  # of a GuestChannel only hello() is called
    waiting = agent.wait_for_hello(helpers, channel, time.monotonic() + left_s)
    for _ in waiting:
        if answers.pop(0):
            waiting.throw(Stopped("generation 7.0.00000000 was ended"))


def test_a_guest_that_answers_soon_costs_no_question() -> None:
    guest = Guest(silent=0)
    hear(guest, answers=[])
    assert guest.waits == [agent.ASK_FIRST_S]


def test_the_job_is_asked_after_each_wait_while_it_runs() -> None:
    guest, answers = Guest(silent=2), [False, False]
    hear(guest, answers)
    assert (len(guest.waits), answers) == (3, [])


def test_when_the_job_has_ended_so_does_its_boot() -> None:
    guest = Guest(silent=float("inf"))
    with pytest.raises(Stopped):
        hear(guest, [False, True])
    assert len(guest.waits) == 2


def test_the_deadline_ends_it_without_a_question() -> None:
    with pytest.raises(ChannelSilentError):
        hear(Guest(silent=float("inf")), answers=[], left_s=0.5)


def test_a_guest_that_is_gone_is_not_waited_for() -> None:
    guest = Guest(silent=float("inf"), error=ChannelError)
    with pytest.raises(ChannelError):
        hear(guest, answers=[])
    assert len(guest.waits) == 1


def test_a_helper_stopped_by_its_user_ends_at_the_next_check() -> None:
    guest = Guest(silent=float("inf"))
    with pytest.raises(UserError):
        hear(guest, answers=[], stopped=True)
    assert len(guest.waits) == 1


def test_a_look_at_a_living_shim_takes_no_time() -> None:
    shim = process.ProcessRef(os.getpid(), process.start_time(os.getpid()) or 0)
    helpers: Any = SimpleNamespace(_daemons={}, shim=shim)
    began = time.monotonic()
    assert Helpers.disturbed(helpers, ending_s=0.0) is None
    assert time.monotonic() - began < 0.5
