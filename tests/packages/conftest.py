# SPDX-License-Identifier: Apache-2.0
"""The packages of this checkout, for all tests of packages.

VHPC_PACKAGES=DIR: those that ``packaging/build`` has written there already.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from debs import run


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the packages of this checkout."""
    folder = tmp_path_factory.mktemp("packages")
    if built := os.environ.get("VHPC_PACKAGES"):
        shutil.copytree(built, folder, dirs_exist_ok=True)
    else:
        run("packaging/build", "--output", folder)
    for symbols in folder.glob("*-dbgsym_*.deb"):
        symbols.unlink()
    return folder
