# SPDX-License-Identifier: Apache-2.0
"""The builder is no installed package: it is imported from the checkout."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
sys.path.insert(0, str(CHECKOUT))


@pytest.fixture(scope="session")
def standin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A static program in the agent's place: says what it sees in the guest and powers off."""
    program = tmp_path_factory.mktemp("standin") / "vhpc-agent"
    source = Path(__file__).parent / "programs" / "standin.c"
    subprocess.run(
        ["gcc", "-std=c17", "-D_GNU_SOURCE", "-O1", "-static", "-o", program, source], check=True, timeout=60
    )
    return program


@pytest.fixture(scope="session")
def init(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """vhpc-init, built from the checkout."""
    build = tmp_path_factory.mktemp("init")
    subprocess.run(
        ["cmake", "-S", CHECKOUT / "guest/init", "-B", build, "-DBUILD_TESTING=OFF"],
        check=True,
        timeout=60,
        stdout=subprocess.DEVNULL,
    )
    subprocess.run(["cmake", "--build", build], check=True, timeout=120, stdout=subprocess.DEVNULL)
    return build / "vhpc-init"
