# SPDX-License-Identifier: Apache-2.0
"""For tests of programs that ask a process with hooks in memory."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pace import limit

ROOT = Path(__file__).parents[3]
PYTHON = '#!/bin/sh\necho "python $*"\nexit ${STATUS:-0}\n'
"""The interpreter that programs start when no process serves them."""


def until(true: Callable[[], object], seconds: float = 60) -> None:
    end = time.monotonic() + limit(seconds)
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


ACCEPTS = "00010000"  # __SO_ACCEPTCON, flags of /proc/net/unix


def listens(path: Path) -> bool:
    """Whether a process listens there; a connection would be a client, which a child would serve."""
    sockets = (line.split() for line in Path("/proc/net/unix").read_text().splitlines())
    return any(words[3] == ACCEPTS and words[-1] == str(path) for words in sockets)


def python(folder: Path) -> Path:
    """That interpreter."""
    made = folder / "python"
    made.write_text(PYTHON)
    made.chmod(0o755)
    return made


def build(program: Path, source: str, **names: object) -> None:
    """Compile a program of hookd/ with definitions."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        pytest.skip("no C compiler: install gcc, or set CC")
    defines = [f'-D{name}="{value}"' for name, value in names.items()]
    sources = [ROOT / "hookd" / source, ROOT / "hookd/ask.c"]
    subprocess.run([compiler, "-std=gnu17", "-D_GNU_SOURCE", *defines, "-o", program, *sources], check=True)
