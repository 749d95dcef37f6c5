# SPDX-License-Identifier: Apache-2.0
"""Fixtures of all tests on the lab."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest
from cluster import VLAB, Lab
from twins import FILES, WHERE

# Each worker of pytest-xdist but the first has a lab of its own: scripts/lab-tests brings them up.
_WORKER = os.environ.get("PYTEST_XDIST_WORKER", "gw0")
if _WORKER != "gw0":
    os.environ["VLAB_STATE"] = os.environ.get("VLAB_STATE", "/run/vhpc-lab") + f"-{_WORKER}"
    if "VLAB_DATA" in os.environ:
        os.environ["VLAB_DATA"] += f"-{_WORKER}"


@pytest.fixture(scope="session")
def lab() -> Lab:
    """The running lab; tests do not bring it up themselves."""
    status = subprocess.run([VLAB, "status"], capture_output=True, check=False, timeout=60)
    if status.returncode != 0:
        pytest.fail("the lab is not up: run `make lab-up` first")
    return Lab()


@pytest.fixture(autouse=True)
def _nothing_left(lab: Lab, request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test: queue empty, nodes idle, vhpc says clean, and so does the independent count."""
    yield
    if "vlab_itself" in request.keywords:
        return
    lab.assert_clean()


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
