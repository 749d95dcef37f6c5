# SPDX-License-Identifier: Apache-2.0
"""Small C programs that tests compile against the headers of the agent and the plugin."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import get_type_hints

import pytest

from vhpc_slurm.options import table

CHECKOUT = Path(__file__).parents[3]
LIB, AGENT, PLUGIN = (CHECKOUT / part for part in ("guest/lib", "guest/agent", "spank_plugin"))


def run_c(folder: Path, program: str, *arguments: str, sources: tuple[Path, ...] = ()) -> str:
    """Compile a program and return what it prints."""
    made = compile_c(folder, program, sources)
    done = subprocess.run([made, *arguments], check=True, capture_output=True, text=True)
    return done.stdout


def compile_c(folder: Path, program: str, sources: tuple[Path, ...] = ()) -> Path:
    """Compile a program; the headers of the plugin need the table of its options."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        pytest.skip("no C compiler: install gcc, or set CC")
    (folder / "probe.c").write_text(program)
    table.write(folder)
    includes = [f"-I{path}" for path in (LIB, AGENT, PLUGIN, folder)]
    command: list[str | Path] = [
        compiler,
        "-std=gnu17",
        "-D_GNU_SOURCE",
        *includes,
        "-o",
        folder / "probe",
        folder / "probe.c",
    ]
    subprocess.run([*command, *sources], check=True, capture_output=True, text=True)
    return folder / "probe"


def values(folder: Path, headers: dict[str, list[str]]) -> dict[str, int]:
    """Values of names of each header by a compiler: enumerators, and macros that are integers."""
    names = [name for group in headers.values() for name in group]
    includes = "#include <stdio.h>\n" + "".join(f'#include "{header}"\n' for header in headers)
    prints = "".join(f'printf("{name} %lld\\n", (long long)({name}));\n' for name in names)
    program = f"{includes}int main(void)\n{{\n{prints}return 0;\n}}\n"
    said = run_c(folder, program)
    return {name: int(value) for name, value in (line.split() for line in said.splitlines())}


def strings(header: str) -> dict[str, str]:
    """Macros that are texts."""
    return dict(re.findall(r'^#define (\w+) "(.*)"$', header, re.MULTILINE))


def highest(settings: type, name: str) -> int:
    """The upper limit of a setting."""
    hint = get_type_hints(settings, include_extras=True)[name]
    (limit,) = (meta.le for meta in hint.__metadata__ if getattr(meta, "le", None) is not None)
    assert isinstance(limit, int)
    return limit
