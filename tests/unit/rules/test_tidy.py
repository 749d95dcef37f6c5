# SPDX-License-Identifier: Apache-2.0
"""scripts/tidy: what has passed is not checked again until it changes."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "tidy"
GOOD = '#include "half.h"\nint one(int number) { return HALF(number) + 17; }\n'
# clang-analyzer-core.DivideZero
DIVIDED = "int one(int number) { int zero = 0; return number / zero; }\n"

pytestmark = pytest.mark.skipif(shutil.which("clang-tidy") is None, reason="needs clang-tidy: make deps")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with one source and one header."""
    root = tmp_path / "project"
    (root / "scripts").mkdir(parents=True)
    shutil.copy(SCRIPT, root / "scripts")
    (root / ".clang-tidy").write_text("Checks: '-*,clang-analyzer-*'\nWarningsAsErrors: '*'\n")
    (root / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.25)\nproject(one C)\nadd_library(one STATIC one.c)\n"
    )
    (root / "half.h").write_text("#define HALF(number) ((number) / 2)\n")
    (root / "one.c").write_text(GOOD)
    return root


def tidy(project: Path) -> tuple[int, str]:
    """Run the script; return its exit status and its output."""
    notes = {"VHPC_TIDY_CACHE": str(project.parent / "notes")}
    done = subprocess.run(
        ["scripts/tidy", "one.c"],
        cwd=project,
        env=os.environ | notes,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def notes(project: Path) -> int:
    return len(list((project.parent / "notes").iterdir()))


def test_a_source_that_has_passed_is_noted_once(project: Path) -> None:
    assert tidy(project) == (0, "")
    assert tidy(project) == (0, "")
    assert notes(project) == 1


def test_a_clone_in_another_folder_uses_the_note(project: Path) -> None:
    tidy(project)
    other = shutil.copytree(project, project.parent / "clone", ignore=shutil.ignore_patterns("build"))
    assert tidy(other) == (0, "")
    assert notes(other) == 1


def test_a_finding_is_printed_each_time(project: Path) -> None:
    (project / "one.c").write_text(DIVIDED)
    for _ in range(2):
        status, output = tidy(project)
        assert status == 1
        assert "Division by zero" in output
    assert notes(project) == 0


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("one.c", DIVIDED),
        ("half.h", "#define HALF(number) ((number) / ((number) - (number)))\n"),
        (
            ".clang-tidy",
            "Checks: '-*,readability-magic-numbers'\nWarningsAsErrors: '*'\n",
        ),
    ],
)
def test_a_change_is_checked(project: Path, name: str, text: str) -> None:
    tidy(project)
    (project / name).write_text(text)
    status, output = tidy(project)
    assert status == 1, output


def test_a_note_that_is_not_used_is_removed(project: Path) -> None:
    tidy(project)
    (old,) = (project.parent / "notes").iterdir()
    (project / "one.c").write_text(GOOD + "\n")
    os.utime(old, (0, time.time() - 91 * 86400))
    tidy(project)
    assert not old.exists()
    assert notes(project) == 1
