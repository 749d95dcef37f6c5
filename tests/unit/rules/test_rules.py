# SPDX-License-Identifier: Apache-2.0
"""Rules of docs/contributing.md that a program can check: sizes of Python code, and names of tests.

scripts/cmodules.py, which `make lint` runs, checks the sizes of C code.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import node_rig
from _pytest.assertion.rewrite import AssertionRewritingHook

ROOT = Path(__file__).parents[3]
MAX_LINES, MAX_FUNCTION, MAX_NAME = 400, 60, 60
LIMITS = {
    "python/vhpc_slurm/cli/jobs/cp.py": (
        450,
        "the program and the scripts in guests are two ends of one stream",
    ),
}
"""Limits of files that are one concept, each with the reason; a split would only follow the limit."""
CODE = ("python", "vmimages", "lab", "bench", "scripts")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def sources(*folders: str) -> Iterator[Path]:
    return (path for folder in folders for path in (ROOT / folder).rglob("*.py"))


@cache
def functions(folder: str) -> list[tuple[str, Function]]:
    """All functions, each with its module and its name."""
    return [
        (f"{path.relative_to(ROOT)}:{node.name}", node)
        for path in sources(folder)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, Function)
    ]


def length(path: Path) -> int:
    """Lines of a module, except the markers of promises."""
    return sum(not line.startswith("@pytest.mark.promise(") for line in path.read_text().splitlines())


def test_a_module_has_a_bounded_length() -> None:
    lines = {str(path.relative_to(ROOT)): length(path) for path in sources(*CODE, "tests")}
    assert len(lines) > 400
    assert {name: count for name, count in lines.items() if count > LIMITS.get(name, (MAX_LINES,))[0]} == {}
    assert LIMITS.keys() <= lines.keys()
    assert all(limit > MAX_LINES and reason for limit, reason in LIMITS.values())


def test_a_function_has_a_bounded_length() -> None:
    found = [one for folder in (*CODE, "tests") for one in functions(folder)]
    assert len(found) > 4000
    assert [name for name, node in found if node.end_lineno - node.lineno >= MAX_FUNCTION] == []  # type: ignore[operator]


def test_a_module_of_tests_has_a_name_of_its_own() -> None:
    """pytest cannot collect two modules of one name: `make unit` names all folders of tests."""
    names = [path.name for path in sources("tests") if path.name.startswith("test_")]
    assert len(names) > 150
    assert {name for name in names if names.count(name) > 1} == set()


def test_failed_assertions_of_helpers_show_their_values() -> None:
    """pytest rewrites the assertions of modules without ``test_`` only if a conftest registers them."""
    assert isinstance(node_rig.__spec__.loader, AssertionRewritingHook)


def test_names_of_tests_have_a_bounded_length() -> None:
    names = {node.name for _, node in functions("tests") if node.name.startswith("test_")}
    assert len(names) > 1000
    assert {name for name in names if len(name) > MAX_NAME} == set()
