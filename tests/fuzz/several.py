# SPDX-License-Identifier: Apache-2.0
"""several.py FOLDER TARGET… -- OPTION…: run fuzz targets in Python one after another, for scripts/fuzz.

Instrumenting takes far longer than a short run: what the targets import is instrumented once, and each target
runs in a child.  FOLDER/TARGET is its corpus, FOLDER/TARGET.log its output; in options, {} stands for TARGET.
Prints each target with its exit status.
"""

from __future__ import annotations

import ast
import gc
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType

import atheris
import rig


def imported(target: str) -> Iterator[str]:
    """Modules that a target imports; itself it makes temporary folders, which belong to the child."""
    tree = ast.parse(Path(__file__).with_name(f"{target}.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)


def child(target: str, log: Path, arguments: list[str]) -> None:
    """Run a target with its output in a file; does not return."""
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    known = set(sys.modules)
    one_input = importlib.import_module(target).one_input
    for found in gc.get_objects():
        if isinstance(found, FunctionType) and found.__module__ not in known:
            atheris.instrument_func(found)
    sys.argv = [target, *arguments]
    rig.run(one_input)


def main() -> None:
    """Instrument, and run the targets."""
    folder, *words = sys.argv[1:]
    end = words.index("--")
    targets, options = words[:end], words[end + 1 :]
    for name in dict.fromkeys(name for target in targets for name in imported(target)):
        importlib.import_module(name)
    atheris.instrument_all()
    sys.stdout.flush()
    for target in targets:
        if (pid := os.fork()) == 0:
            arguments = [option.replace("{}", target) for option in options]
            child(target, Path(folder) / f"{target}.log", [*arguments, f"{folder}/{target}"])
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print(target, 128 - code if code < 0 else code, flush=True)


main()
