#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""promises.py: print a page with the promises and defences of each file of tests.

Keys begin the items of docs/guarantees.md and docs/threat-model.md.  A Python test names
its keys with @pytest.mark.promise("KEY", ...), a file of tests in its pytestmark.  A C test and a fuzz target
have a comment "promise: KEY, ..." in the line above the function, or below the licence for the whole file.
A star marks tests that run, in whole or in part, in `make check-slow` only.

Exit status 1: a key has no test, or a test names an unknown key.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("docs/guarantees.md", "docs/threat-model.md")
HEAD = """# Tests of the guarantees

The files of tests, and the keys of the promises ([guarantees.md](../docs/guarantees.md)) and defences
([threat-model.md](../docs/threat-model.md)) that each file holds; the tests carry the key.
Paths are below `tests/`, those of fuzz targets of guest programs in `guest/fuzz/`.
`make check-slow` runs keys with a star.

"""
KEY = re.compile(r"^- `([a-z0-9.-]+)`: ", re.MULTILINE)
NAMED = re.compile(r"\(`(attack\.[a-z0-9.-]+)`\)")
"""A key in a sentence, for a defence that is in no list."""
COMMENT = re.compile(r"(?:/\*|#) promise: ([a-z0-9., -]+?)(?: \*/)?")
C_FUNCTION = re.compile(r"(?:static )?(?:void|int) (\w+)\(")
SLOW_MARKS = re.compile(r"\bmark\.(?:slow|hw)\b")
IN_CHECK = "hw/test_hw_devices.py"
"""The file of tests/hw that make check runs."""

Found = tuple[str, str]
"""A key, and the name of one of its tests."""


def keys(root: Path) -> list[str]:
    """All keys, in the order of the pages."""
    texts = [(root / page).read_text(encoding="utf-8") for page in PAGES]
    return list(dict.fromkeys(key for text in texts for key in KEY.findall(text) + NAMED.findall(text)))


def promised(nodes: list[ast.expr]) -> list[str]:
    """The keys in decorators, or in the value of pytestmark."""
    calls = [node for one in nodes for node in ast.walk(one) if isinstance(node, ast.Call)]
    marks = [call for call in calls if ast.unparse(call.func) == "pytest.mark.promise"]
    return [str(arg.value) for mark in marks for arg in mark.args if isinstance(arg, ast.Constant)]


def of_python(path: Path, name: str, slow: set[str]) -> Iterator[Found]:
    """The pairs in a file of Python tests."""
    text = path.read_text(encoding="utf-8")
    if "mark.promise(" not in text:
        return
    tree = ast.parse(text)
    marks = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    ]

    def starred(nodes: list[ast.expr], *names: str) -> bool:
        marked = bool(SLOW_MARKS.search(" ".join(map(ast.unparse, [*marks, *nodes]))))
        return (marked and name != IN_CHECK) or not slow.isdisjoint({name, *names})

    for key in promised(marks):
        yield key, f"`{name}`{'*' if starred([]) else ''}"
    for test in ast.walk(tree):
        if isinstance(test, ast.FunctionDef):
            full = f"{name}::{test.name}"
            for key in promised(test.decorator_list):
                yield key, f"`{full}`{'*' if starred(test.decorator_list, full) else ''}"


def of_comments(path: Path, name: str) -> Iterator[Found]:
    """The pairs in C tests and in fuzz targets."""
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines):
        if found := COMMENT.fullmatch(line):
            function = C_FUNCTION.match(lines[number + 1])
            test = f"{name}::{function[1]}" if function else name
            yield from ((key, f"`{test}`") for key in found[1].split(", "))


def tests(root: Path) -> dict[str, list[str]]:
    """The tests of each key, sorted."""
    slow = set(tomllib.loads((root / "tests/slow.toml").read_text(encoding="utf-8")))
    found: dict[str, set[str]] = defaultdict(set)
    for path in sorted((root / "tests").rglob("test_*.py")):
        for key, test in of_python(path, str(path.relative_to(root / "tests")), slow):
            found[key].add(test)
    targets = [*(root / "guest/fuzz").glob("*.c"), *(root / "tests/fuzz").glob("fuzz_*.py")]
    for path in [*(root / "tests").rglob("*.c"), *targets]:
        folder = root / "tests" if path.is_relative_to(root / "tests") else root
        for key, test in of_comments(path, str(path.relative_to(folder))):
            found[key].add(test)
    return {key: sorted(names) for key, names in found.items()}


def by_file(keys: list[str], found: dict[str, list[str]]) -> dict[str, str]:
    """The keys of each file of tests; a star if all tests of the key in this file are slow."""
    files: dict[str, dict[str, bool]] = defaultdict(dict)
    for key in keys:
        for test in found.get(key, ()):
            held = files[test.strip("`*").partition("::")[0]]
            held[key] = held.get(key, True) and test.endswith("*")
    return {
        name: ", ".join(f"`{key}`{'*' if slow else ''}" for key, slow in held.items())
        for name, held in sorted(files.items())
    }


def page(root: Path) -> tuple[str, list[str]]:
    """The page, and what is wrong with the keys."""
    wanted, found = keys(root), tests(root)
    wrong = [f"{key}: no test names this key" for key in wanted if key not in found]
    wrong += [
        f"{key}: named by {names[0]} and on no page" for key, names in found.items() if key not in wanted
    ]
    rows = [f"- `{name}`: {held}\n" for name, held in by_file(wanted, found).items()]
    return HEAD + "".join(rows), wrong


def main(arguments: list[str]) -> int:
    """Print the page, and what is wrong with the keys."""
    if arguments:
        print(__doc__, file=sys.stderr)
        return 2
    text, wrong = page(ROOT)
    print(text, end="")
    for line in wrong:
        print(f"promises: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
