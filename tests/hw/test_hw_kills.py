"""A Prolog with a GPU and a virtual function, killed at each of its writes: by hand, so that each is met."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest
from machine import IMAGE, Done, Machine

pytestmark = [pytest.mark.hw, pytest.mark.timeout(900)]

DRIVER = (Path(__file__).parents[1] / "killed_prolog.py").read_text()
KILLED = 128 + 9
WRITES = 10
"""At least so many are in a boot with devices: one for each stage."""


class ByHand:
    """A job that Slurm knows nothing of, with both CPUs, a GPU and a function: its hooks are called here."""

    ids = itertools.count(int(time.time()) % 10**8 * 10 + 10**9)

    def __init__(self, machine: Machine) -> None:
        self.machine, self.id = machine, next(self.ids)
        self.env = (
            "env", "-i", f"SLURM_JOB_ID={self.id}", "SLURMD_NODENAME=hw", f"SPANK_VHPC_IMAGE={IMAGE}",
        )  # fmt: skip
        self.drive("open", "--cpus", "2", "--memory", "768", "--gpu", "0", "--vfs", "1")

    def drive(self, *argv: str, check: bool = True) -> Done:
        command = (*self.env, "/opt/vhpc/bin/python", "-I", "-", *argv)
        return self.machine.run(*command, stdin=DRIVER, check=check, timeout=300)

    def end(self) -> None:
        self.machine.run(*self.env, "/usr/libexec/vhpc/epilog", timeout=120)
        self.drive("end")


def test_a_prolog_killed_at_any_write_leaves_its_devices_as_they_were(quiet: Machine) -> None:
    before = quiet.probe("node")
    for number in itertools.count(1):
        job = ByHand(quiet)
        with quiet.stage(f"kill -9 of the Prolog at its write {number}, then the Epilog"):
            code = job.drive(str(number), check=False).code
            job.end()
        assert quiet.probe("node") == before
        if code == 0:
            assert number > WRITES
            return
        assert code == KILLED


def test_libvirtd_killed_at_a_write_of_the_prolog_costs_no_device(quiet: Machine) -> None:
    before = quiet.probe("node")
    for number in itertools.count(1, 3):
        job = ByHand(quiet)
        with quiet.stage(f"kill -9 of libvirtd at the Prolog's write {number}, then the Epilog"):
            done = job.drive(str(number), "libvirtd", check=False)
            job.end()
        quiet.until(lambda: quiet.probe("node") == before, "all as before")
        if int(done.out) < number:
            assert number > WRITES
            return
