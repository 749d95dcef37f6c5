# SPDX-License-Identifier: Apache-2.0
"""Fixtures of all tests on the lab."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import VLAB, EmulatorError, Lab
from injection import until
from twins import FILES, WHERE

LIMIT_S = 1200
# Files that take longest: they come first, so that no lab works alone at the end.
LONGEST = (
    *("network", "jobs", "same", "errors", "cluster", "checkpoint", "faults", "het", "fabric", "isolation"),
    *("usage", "images", "policy", "user_tools", "commands", "nat", "signals", "user_views", "import"),
    *("covered_commands", "preemption", "attacks_helpers"),
)

# Each worker of pytest-xdist but the first has a lab of its own: scripts/lab-tests brings them up.
_WORKER = os.environ.get("PYTEST_XDIST_WORKER", "gw0")
if _WORKER != "gw0":
    os.environ["VLAB_STATE"] = os.environ.get("VLAB_STATE", "/run/vhpc-lab") + f"-{_WORKER}"
    if "VLAB_DATA" in os.environ:
        os.environ["VLAB_DATA"] += f"-{_WORKER}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sets the limit and the order of the tests on the lab.

    No test is ended because the machine is slow: each wait has a limit of its own.  With pytest-randomly,
    files are in random order; the tests of a file are not: most share jobs, and end them in turn.
    """
    ours = [item for item in items if item.path.is_relative_to(Path(__file__).parent)]
    for item in ours:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(LIMIT_S))
    paths = list(dict.fromkeys(item.path for item in ours))
    if config.getoption("randomly_seed", None) is None:
        places = {f"test_{name}.py": place for place, name in enumerate(LONGEST)}
        paths.sort(key=lambda path: places.get(path.name, len(places)))
    files = {path: number for number, path in enumerate(paths)}
    ordered = iter(sorted(ours, key=lambda item: (files[item.path], item.location[1] or 0)))
    items[:] = [next(ordered) if item in ours else item for item in items]


@pytest.fixture(scope="session")
def lab() -> Lab:
    """The running lab; tests do not bring it up themselves."""
    status = subprocess.run([VLAB, "status"], capture_output=True, check=False, timeout=60)
    if status.returncode != 0:
        pytest.fail("the lab is not up: run `make lab-up` first")
    return Lab()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Function) -> Iterator[None]:
    """A fixture that waited in vain for a guest in which no time passes fails by the emulator's fault."""
    yield from _emulator_faults_are_found(item)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Function) -> Iterator[None]:
    """So does a test."""
    yield from _emulator_faults_are_found(item)


def _emulator_faults_are_found(item: pytest.Function) -> Iterator[None]:
    used = item.funcargs.get("lab")
    try:
        try:
            yield
        except (AssertionError, pytest.fail.Exception):
            if isinstance(used, Lab):
                used.time_passes()
            raise
    except EmulatorError:
        if isinstance(used, Lab):
            _begin_again(item, used)
        raise


def _begin_again(item: pytest.Function, lab: Lab) -> None:
    """End all jobs and the fixtures of the module: its job may be the one with the fault."""
    lab.cancel_all()
    # pytest has no public way to end fixtures early; finish() reads only the node of a request
    for definitions in item._fixtureinfo.name2fixturedefs.values():
        for definition in definitions:
            if definition.scope == "module":
                definition.finish(item._request)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test with the lab: queue empty, nodes idle, and an independent count finds nothing."""
    lab = request.getfixturevalue("lab") if "lab" in request.fixturenames else None
    yield
    if lab and not {"vlab_itself", "results"} & set(request.keywords):
        lab.assert_nothing_left()


@pytest.fixture(autouse=True, scope="module")
def _clean_nodes(request: pytest.FixtureRequest) -> Iterator[None]:
    """The same after a module, also by vhpc's report: its command takes longer than all of the count."""
    ours = [item for item in request.session.items if item.path == request.path]
    users = [item for item in ours if isinstance(item, pytest.Function) and "lab" in item.fixturenames]
    lab = request.getfixturevalue("lab") if users else None
    yield
    if lab and any("vlab_itself" not in item.keywords for item in users):
        lab.assert_clean()


@pytest.fixture
def no_health_check(lab: Lab) -> Iterator[str]:
    """HealthCheckProgram, which runs once a minute, does not change on n1 what a test looks at.

    Gives the path of the program, for tests that run it themselves.
    """
    program = "/usr/libexec/vhpc/healthcheck"
    runs = ("pgrep", "-f", f"{program}|hooks[.]healthcheck")
    lab.run("n1", "cp", "-a", program, f"{program}.kept")
    try:
        lab.run("n1", "ln", "-s", "/bin/true", f"{program}.none")
        lab.run("n1", "mv", "-T", f"{program}.none", program)
        until(lambda: not lab.run("n1", *runs, check=False).out, "the end of the health check", 120)
        yield f"{program}.kept"
    finally:
        lab.run("n1", "mv", "-f", f"{program}.kept", program)


@pytest.fixture(scope="module")
def probes(lab: Lab) -> Iterator[None]:
    """The folder of programs that say what has been done to them."""
    lab.run("login", "mkdir", "-p", WHERE, user="alice")
    for name, text in FILES.items():
        lab.run(
            "login", "sh", "-c", f"cat > {WHERE}/{name}; chmod 755 {WHERE}/{name}", user="alice", stdin=text
        )
    yield
    lab.run("login", "rm", "-rf", WHERE, user="alice")
