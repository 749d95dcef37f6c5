# SPDX-License-Identifier: Apache-2.0
"""A Prolog with a GPU and a virtual function, killed at each of its writes: by hand, so that each is met."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
from machine import IMAGE, Machine

from by_hand import KILLED, ByHand

pytestmark = [pytest.mark.hw, pytest.mark.timeout(900)]

WRITES = 10
"""At least so many are in a boot with devices: one for each stage."""


def job_by_hand(machine: Machine) -> ByHand:
    """With both CPUs, a GPU and a function."""
    lease = ("--cpus", "2", "--memory", "768", "--gpu", "0", "--vfs", "1")
    run = partial(machine.run, timeout=300)
    return ByHand(run, run, "hw", IMAGE, *lease)


def end(job: ByHand) -> None:
    job.hook("epilog")
    job.drive("end")


@pytest.mark.promise("hw.killed")
def test_a_prolog_killed_at_any_write_leaves_devices_unchanged(quiet: Machine) -> None:
    before = quiet.probe("node")
    for number in itertools.count(1):
        job = job_by_hand(quiet)
        with quiet.stage(f"kill -9 of the Prolog at its write {number}, then the Epilog"):
            code = job.drive(str(number), check=False).code
            end(job)
        assert quiet.probe("node") == before
        if code == 0:
            assert number > WRITES
            return
        assert code == KILLED


@pytest.mark.promise("hw.killed")
def test_libvirtd_killed_at_a_prolog_write_costs_no_device(quiet: Machine) -> None:
    before = quiet.probe("node")
    for number in itertools.count(1, 3):
        job = job_by_hand(quiet)
        with quiet.stage(f"kill -9 of libvirtd at the Prolog's write {number}, then the Epilog"):
            done = job.drive(str(number), "libvirtd", check=False)
            end(job)
        quiet.until(lambda: quiet.probe("node") == before, "all as before")
        if int(done.out) < number:
            assert number > WRITES
            return
