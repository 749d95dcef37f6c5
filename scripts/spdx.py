#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Find source files without SPDX line: spdx.py [--fix] FILE…

Every source file in Python, C, shell, CMake and make begins with this line, after
an interpreter line.  Data, captured files, corpora, templates and configuration
have none.  ``--fix`` writes missing lines.  Exit status 1: a line is missing.

Source: https://spdx.dev/learn/handling-license-info/
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

LICENSE = "SPDX-License-Identifier: Apache-2.0"
HASH, C = f"# {LICENSE}", f"/* {LICENSE} */"
LINES = {".py": HASH, ".pyi": HASH, ".sh": HASH, ".cmake": HASH, ".c": C, ".h": C}
NAMES = {"CMakeLists.txt": HASH, "Makefile": HASH}
INTERPRETER = re.compile(rb"#!.*\b(?:sh|bash|python3?)\b")
NOT_SOURCES = re.compile(r"(?:^|/)(?:corpus|data)/")


def wanted(path: Path, text: bytes) -> str:
    """The line that a file must have; empty if it is not a source file."""
    if NOT_SOURCES.search(path.as_posix()):
        return ""
    named = NAMES.get(path.name) or LINES.get(path.suffix)
    if named:
        return named
    return HASH if INTERPRETER.match(text) else ""


def parts(text: bytes) -> tuple[bytes, bytes]:
    """The interpreter line, may be empty, and the rest."""
    if not text.startswith(b"#!"):
        return b"", text
    first, newline, rest = text.partition(b"\n")
    return first + newline, rest


def has(text: bytes, line: str) -> bool:
    """Whether a source begins with the line."""
    return parts(text)[1].split(b"\n", 1)[0] == line.encode()


def main(arguments: list[str]) -> int:
    """Check or fix the files."""
    fix = "--fix" in arguments
    lacking = []
    for name in arguments:
        path = Path(name)
        if name == "--fix" or not path.is_file():
            continue
        text = path.read_bytes()
        line = wanted(path, text)
        if not line or has(text, line):
            continue
        if fix:
            first, rest = parts(text)
            path.write_bytes(first + line.encode() + b"\n" + rest)
        else:
            lacking.append(f"{name}: the first line (after the interpreter's) is not: {line}")
    print("\n".join(lacking), end="\n" * bool(lacking))
    return bool(lacking)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
