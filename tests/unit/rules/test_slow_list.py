# SPDX-License-Identifier: Apache-2.0
"""The lists of slow tests, and of tests that no emulator runs, name tests that exist, each with a reason."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]
TESTS = Path(__file__).parents[2]
SLOW = tomllib.loads((TESTS / "slow.toml").read_text())
ARM64 = tomllib.loads((TESTS / "arm64.toml").read_text())


@pytest.mark.parametrize("name", sorted(ARM64["ctest"]))
def test_c_test_left_out_exists_and_has_a_reason(name: str) -> None:
    program, _, test = name.partition("::")
    group, _, part = program.partition("_")
    assert re.search(rf"^static void {test}\(", (TESTS / group / f"test_{part}.c").read_text(), re.M)
    assert len(ARM64["ctest"][name].split()) >= 3


@pytest.mark.parametrize("name", sorted(ARM64["unit"]))
def test_unit_test_left_out_exists_and_has_a_reason(name: str) -> None:
    path, _, test = name.partition("::")
    assert test or (TESTS / "unit" / path).exists()
    assert not test or re.search(rf"^def {re.escape(test)}\(", (TESTS / "unit" / path).read_text(), re.M)
    assert len(ARM64["unit"][name].split()) >= 3


@pytest.mark.parametrize("name", sorted(SLOW))
def test_slow_test_exists_and_has_a_reason(name: str) -> None:
    path, _, test = name.partition("::")
    source = (TESTS / path).read_text()
    assert not test or re.search(rf"^def {re.escape(test.partition('[')[0])}\(", source, re.M), name
    assert len(SLOW[name].split()) >= 3


def test_listed_tests_are_deselected_by_not_slow(pytester: pytest.Pytester) -> None:
    """By file, by test and by case, as tests/conftest.py does it."""
    conftest = (TESTS / "conftest.py").read_text()
    (pytester.path / "tests").mkdir()
    pytester.makefile(".py", **{"tests/conftest": conftest, "tests/pace": (TESTS / "pace.py").read_text()})
    pytester.makefile(".py", **{"tests/test_all": "def test_a(): pass"})
    some = "import pytest\n@pytest.mark.parametrize('n', [1, 2])\ndef test_b(n): pass\ndef test_c(): pass\n"
    pytester.makefile(".py", **{"tests/test_some": some})
    listed = {"test_all.py": "r", "test_some.py::test_b[1]": "r", "test_some.py::test_c": "r"}
    text = "".join(f'"{key}" = "{value}"\n' for key, value in listed.items())
    (pytester.path / "tests/slow.toml").write_text(text)
    done = pytester.runpytest_subprocess("-m", "not slow", "-q", "-p", "no:xdist", "--collect-only", "tests")
    assert [line for line in done.outlines if "::" in line] == ["tests/test_some.py::test_b[2]"]
