# SPDX-License-Identifier: Apache-2.0
"""For all tests: processes that they start import the checkout's package too, and tests may run side by side.

With ``pytest -n N --dist loadgroup`` (pytest-xdist; `make unit`) the tests of
a file stay on one worker, since they share fixtures such as a subnet manager.
Each worker has a network of its own, with nothing but a loopback interface, so
that fixed addresses and ports below 1024 are its own.  Other resources that
exist once on a machine have a group of the mark ``xdist_group``, such as
control groups.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import hypothesis
import pytest

from pace import examples, limit

SLOW: dict[str, str] = tomllib.loads((Path(__file__).parent / "slow.toml").read_text())
"""Files, tests and cases of tests (`lab/test_x.py::test_y[case]`), each with the reason."""
LIMIT_S = 300
"""Seconds for a test, so that a test that hangs ends."""
os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[1] / "python")
_CLONE_NEWNET = 0x40000000  # os.unshare comes with Python 3.12
# Background shells ignore it, and programs that tests interrupt would ignore it, too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Without this pytest shows the values of a failed assertion only if a test module or a conftest has it.
_NAMES = {path.stem for path in Path(__file__).parent.rglob("[a-z]*.py")}
pytest.register_assert_rewrite(*sorted(_NAMES - sys.modules.keys()))

# How long an example takes says more of the machine than of what is tested.
hypothesis.settings.register_profile("untimed", deadline=None, max_examples=examples(100))
hypothesis.settings.load_profile("untimed")


@pytest.hookimpl(trylast=True)  # plugins connect to the main process first
def pytest_configure() -> None:
    # scripts/lab-tests gives each worker a lab, which has networks of its own
    on_labs = "VHPC_LAB_TESTS" in os.environ
    if "PYTEST_XDIST_WORKER" in os.environ and os.geteuid() == 0 and not on_labs:
        if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "cannot give the tests a network of their own: unshare")
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True, timeout=10)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Tests of a file are a group, and those in the list of slow ones run in make check-slow only.

    pytest-xdist reads groups before a hook of ``pytest_collection_modifyitems`` that is here could set them.
    """
    if item.get_closest_marker("xdist_group") is None:
        item.add_marker(pytest.mark.xdist_group(item.path.name))
    path, _, name = item.nodeid.removeprefix("tests/").partition("::")
    test = name.partition("[")[0]
    if not SLOW.keys().isdisjoint({path, f"{path}::{test}", f"{path}::{name}"}):
        item.add_marker(pytest.mark.slow)


@pytest.hookimpl(trylast=True)  # folders of tests have limits of their own
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sets the limits; files with long unit tests come first, so that no worker has one alone at the end."""
    for item in items:
        own = item.get_closest_marker("timeout")
        item.add_marker(pytest.mark.timeout(limit(own.args[0] if own else LIMIT_S)), append=False)
    if config.getoption("randomly_seed", None) is None:
        first = {item.path for item in items if item.get_closest_marker("long")}
        items.sort(key=lambda item: item.path not in first)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says why tests were run again; pytest-rerunfailures has only their names."""
    for report in terminalreporter.getreports("rerun"):
        crash = getattr(report.longrepr, "reprcrash", None)
        terminalreporter.write_line(
            f"run again: {report.nodeid}: {getattr(crash, 'message', report.longrepr)}"
        )


def pytest_collection_finish() -> None:
    """Ten thousand collected tests stay until the end: the garbage collector need not look at them again."""
    gc.freeze()
