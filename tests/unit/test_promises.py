# SPDX-License-Identifier: Apache-2.0
"""What the documents say is held by a test is held by one that exists."""

from __future__ import annotations

import ast
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REFERENCE = re.compile(r"`((?:unit|lab|hw|guest|spank|image)/[\w/]+\.(?:py|c))(?:::(\w+))?`")
TARGET = re.compile(r"fuzz targets? `(fuzz_\w+)`")


@pytest.mark.parametrize(
    "name", ["guarantees.md", "threat-model.md", "differences.md", "performance-settings.md"]
)
def test_every_test_that_is_named_exists(name: str) -> None:
    text = (ROOT / "docs" / name).read_text()
    found = REFERENCE.findall(text)
    missing = []
    for file, test in found:
        path = ROOT / "tests" / file
        source = path.read_text() if path.is_file() else ""
        if not re.search(rf"(?:def|void) {test}\(" if test else ".", source):
            missing.append(f"{file}::{test}")
    assert missing == []
    assert len(found) > 3 or name == "differences.md"


@cache
def slow_tests(file: str) -> set[str]:
    """Names of a file's tests that `make check` does not run: by marks, or by the list of slow tests."""
    listed = tomllib.loads((ROOT / "tests/slow.toml").read_text())
    module = ast.parse((ROOT / "tests" / file).read_text())
    tests = [node for node in module.body if isinstance(node, ast.FunctionDef)]
    marks = " ".join(
        ast.unparse(node)
        for node in module.body
        if isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node)
    )
    return {
        test.name
        for test in tests
        if "mark.slow" in marks + " ".join(map(ast.unparse, test.decorator_list))
        or not listed.keys().isdisjoint({file, f"{file}::{test.name}"})
    }


@pytest.mark.parametrize("name", ["guarantees.md", "threat-model.md", "differences.md"])
def test_stars_mark_the_tests_that_make_check_does_not_run(name: str) -> None:
    text = (ROOT / "docs" / name).read_text()
    wrong = [
        f"{file}::{test}{'' if star else '*'}"
        for file, test, star in re.findall(r"`((?:unit|lab)/\w+\.py)::(\w+)`(\*?)", text)
        if bool(star) != (test in slow_tests(file))
    ]
    assert wrong == []


def test_every_fuzz_target_that_is_named_is_run() -> None:
    script = (ROOT / "scripts/fuzz").read_text()
    named = TARGET.findall((ROOT / "docs/threat-model.md").read_text())
    assert named
    assert [target for target in named if f"[{target}]=" not in script] == []


def test_a_guarantees_test_counts_only_when_it_exists(tmp_path: Path) -> None:
    """The pattern sees what it is to see."""
    assert REFERENCE.findall("`lab/test_jobs.py::test_x`, `unit/test_scontrol.py`, `guest/test_a.c::b`*") == [
        ("lab/test_jobs.py", "test_x"),
        ("unit/test_scontrol.py", ""),
        ("guest/test_a.c", "b"),
    ]
