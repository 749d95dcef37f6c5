#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""cmodules.py [--graph] [FOLDER…]: check the structure of the C code; for `scripts/lint`.

A module is NAME.c with NAME.h in one folder (either may be missing).  Module A depends on module B of
the same folder if A includes B's header, or uses a function or variable that B's source defines.  The
check reports cycles of dependencies, files of more than 400 lines and functions of more than 60 lines.

Without arguments it checks every folder with C files that git does not ignore.  --graph prints the
dependencies instead.  The code must be formatted by clang-format with the project's style: a
definition begins in the first column and its body ends with a brace there.

Exit status 1: the check failed.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

FILE_LINES_MAX = 400
FUNCTION_LINES_MAX = 60

Graph = dict[str, set[str]]

_COMMENT_OR_LITERAL = re.compile(r"/\*.*?\*/|//[^\n]*|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])+'", re.DOTALL)
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"/]+)\.h"', re.MULTILINE)
_FUNCTION = re.compile(
    r"^(?P<head>[A-Za-z_][\w \t*]*?[ \t*])(?P<name>\w+)\((?P<arguments>[^;{}]*)\)\n\{\n.*?^\}",
    re.MULTILINE | re.DOTALL,
)
_VARIABLE = re.compile(
    r"^(?!static\b|extern\b|typedef\b|enum\b|return\b|goto\b|else\b|case\b)"
    r"[A-Za-z_][\w \t*]*[ \t*](?P<name>\w+)(?:\[[^\]]*\])*(?: =[^;]|;)",
    re.MULTILINE,
)
# Identifiers except members of a structure.
_USE = re.compile(r"(?<![.\w])(?<!->)[A-Za-z_]\w*")


def blanked(text: str) -> str:
    """The text with comments and literals replaced by spaces; line breaks are kept."""
    return _COMMENT_OR_LITERAL.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)


def static_in(source: str) -> set[str]:
    """Names of the static functions of a blanked source."""
    return {found["name"] for found in _FUNCTION.finditer(source) if "static" in found["head"].split()}


def defined_in(source: str) -> set[str]:
    """Names with external linkage that a blanked source defines."""
    functions = {found["name"] for found in _FUNCTION.finditer(source)} - static_in(source)
    bodies = _FUNCTION.sub("", source)
    return functions | {found["name"] for found in _VARIABLE.finditer(bodies)}


def dependencies(folder: Path) -> Graph:
    """For each module of a folder, the modules on which it depends."""
    files = [path for path in sorted(folder.iterdir()) if path.suffix in (".c", ".h")]
    modules = {path.stem for path in files}
    texts = {path: path.read_text() for path in files}
    code = {path: blanked(text) for path, text in texts.items()}
    owner = {name: path.stem for path in files if path.suffix == ".c" for name in defined_in(code[path])}
    graph: Graph = {module: set() for module in sorted(modules)}
    for path in files:
        used = set(_USE.findall(code[path])) - static_in(code[path]) if path.suffix == ".c" else set()
        needed = {owner[name] for name in used & owner.keys()}
        needed |= {name for name in _INCLUDE.findall(texts[path]) if name in modules}
        graph[path.stem] |= needed - {path.stem}
    return graph


def circles(graph: Graph) -> list[list[str]]:
    """Groups of modules in which each depends on each other, directly or indirectly (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in sorted(graph[module]):
            if other not in index:
                visit(other)
            if other in stack:
                low[module] = min(low[module], low[other])
        if low[module] == index[module]:
            at = stack.index(module)
            group = sorted(stack[at:])
            del stack[at:]
            if len(group) > 1:
                found.append(group)

    for module in sorted(graph):
        if module not in index:
            visit(module)
    return found


def too_long(path: Path) -> Iterator[str]:
    """One line for the file and for each of its functions that is longer than allowed."""
    text = path.read_text()
    lines = text.count("\n")
    if lines > FILE_LINES_MAX:
        yield f"{path}: {lines} lines, the limit is {FILE_LINES_MAX}"
    for found in _FUNCTION.finditer(blanked(text)):
        length = found[0].count("\n") + 1
        if length > FUNCTION_LINES_MAX:
            line = text.count("\n", 0, found.start()) + 1
            yield f"{path}:{line}: {found['name']}() has {length} lines, the limit is {FUNCTION_LINES_MAX}"


def findings(folder: Path) -> Iterator[str]:
    """One line for each finding in a folder."""
    graph = dependencies(folder)
    for group in circles(graph):
        edges = [f"{a} -> {b}" for a in group for b in group if b in graph[a]]
        yield f"{folder}: cycle of modules: {', '.join(edges)}"
    for path in sorted(folder.iterdir()):
        if path.suffix in (".c", ".h"):
            yield from too_long(path)


def known_folders() -> list[Path]:
    """Folders with C files that git does not ignore."""
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.c", "*.h"]
    names = subprocess.run(listing, check=True, capture_output=True, text=True).stdout.splitlines()
    return sorted({Path(name).parent for name in names if Path(name).is_file()})


def main() -> int:
    """Run the check; return the exit status."""
    arguments = sys.argv[1:]
    graph_only = "--graph" in arguments
    folders = [Path(name) for name in arguments if name != "--graph"] or known_folders()
    faults = 0
    for folder in folders:
        if graph_only:
            for module, needed in dependencies(folder).items():
                print(f"{folder}/{module}: {' '.join(sorted(needed))}")
            continue
        for line in findings(folder):
            print(line, file=sys.stderr)
            faults += 1
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
