# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests in the hardware lab's machine, and the table of what took how long."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator

import pytest
from machine import HWLAB, GuestDiedError, Machine, MachineDiedError

_TABLE = pytest.StashKey[Machine]()


@pytest.fixture(scope="session")
def machine(pytestconfig: pytest.Config) -> Iterator[Machine]:
    """The machine; one that runs already is used and left alone."""
    found = Machine()
    pytestconfig.stash[_TABLE] = found
    runs = found.alive()
    if not runs:
        found.boot()
    yield found
    if not runs:
        subprocess.run([HWLAB, "down"], check=True, timeout=60)


@pytest.fixture
def quiet(machine: Machine) -> Iterator[Machine]:
    """The machine, in which nothing is left of a test when it is over."""
    machine.revive()
    before = machine.probe("node")
    yield machine
    machine.quiet()
    end = time.monotonic() + machine.limit(60)
    while changes := differences(before, machine.probe("node")):
        assert time.monotonic() < end, f"not as before:\n{changes}\n{machine.story()}"
        time.sleep(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that the emulator spoiled is run again: the emulator is not what is tested."""
    spoiled = [MachineDiedError.__name__, GuestDiedError.__name__]
    for item in items:
        if "hw" in item.keywords:
            item.add_marker(pytest.mark.flaky(reruns=4, only_rerun=spoiled))


def differences(before: dict[str, object], after: dict[str, object]) -> str:
    """The differences, a line each."""
    pairs = {name: (before[name], after[name]) for name in before if before[name] != after[name]}
    return "\n".join(f"{name}: {was}\n{' ' * len(name)}  {now}" for name, (was, now) in pairs.items())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the stages, and why tests were run again."""
    for report in terminalreporter.getreports("rerun"):
        terminalreporter.section(f"why {report.nodeid} was run again")
        terminalreporter.write_line(report.longreprtext)
    found = config.stash.get(_TABLE, None)
    if found is not None and found.stages:
        terminalreporter.section("hardware lab: seconds by stage")
        for name, seconds in found.stages:
            terminalreporter.write_line(f"{seconds:7.1f}  {name}")
