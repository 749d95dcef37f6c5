# SPDX-License-Identifier: Apache-2.0
"""Options of packaging/build: a bad value is one line."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.skipif(shutil.which("dpkg") is None, reason="asks dpkg for the architecture: run it on Debian")
@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--arch", "aarch64", "--arch aarch64: unknown architecture aarch64; known: amd64, arm64"),
        ("--suite", "sarge", "unknown suite sarge; known: bookworm, trixie"),
    ],
)
def test_a_bad_value_is_one_line_with_the_known_ones(option: str, value: str, says: str) -> None:
    done = subprocess.run(
        ["packaging/build", option, value], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"packaging/build: {says}\n")
