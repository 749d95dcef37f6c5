# SPDX-License-Identifier: Apache-2.0
"""The packages of this checkout, for all tests of packages.

VHPC_PACKAGES=DIR: those for Debian 13 that ``packaging/build`` has written there already.
VHPC_PACKAGES_BOOKWORM=DIR: the same for Debian 12.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from debs import BOOKWORM, SUITES, TRIXIE, Suite, run


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Suite], Path]:
    """Build the packages for a suite, once; returns their folder."""

    @cache
    def build(suite: Suite) -> Path:
        folder = tmp_path_factory.mktemp("packages")
        given = {TRIXIE: "VHPC_PACKAGES", BOOKWORM: "VHPC_PACKAGES_BOOKWORM"}[suite]
        if done := os.environ.get(given):
            shutil.copytree(done, folder, dirs_exist_ok=True)
        else:
            run("packaging/build", "--suite", suite.name, "--output", folder)
        for symbols in folder.glob("*-dbgsym_*.deb"):
            symbols.unlink()
        return folder

    return build


@pytest.fixture(scope="session")
def packages(built: Callable[[Suite], Path]) -> Path:
    """A folder with the packages of this checkout for Debian 13."""
    return built(TRIXIE)


@pytest.fixture(scope="session", params=SUITES, ids=[suite.name for suite in SUITES])
def suite(request: pytest.FixtureRequest) -> Suite:
    """Each suite that packages are built for."""
    found = request.param
    assert isinstance(found, Suite)
    return found
