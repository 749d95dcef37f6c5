# SPDX-License-Identifier: Apache-2.0
"""The next version: a checkout whose version, protocol and schema are higher by one."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

SCHEMA = "python/vhpc_slurm/controller/store/schema.py"


def make_next(source: Path) -> None:
    """Make the sources of a checkout those of the next version."""
    _replace(
        source / "python/vhpc_slurm/__init__.py",
        r'^__version__ = "(\d+\.\d+)\.(\d+)"',
        lambda found: f'__version__ = "{found[1]}.{int(found[2]) + 1}"',
    )
    _replace(
        source / "python/vhpc_slurm/controller/api/versions.py",
        r"^VERSION = (\d+)$",
        lambda found: f"VERSION = {int(found[1]) + 1}",
    )
    _replace(source / SCHEMA, r"^(?=SCHEMA_VERSION = len\(STEPS\)$)", lambda _: 'STEPS = (*STEPS, "")\n')


def _replace(path: Path, pattern: str, by: Callable[[re.Match[str]], str]) -> None:
    text, count = re.subn(pattern, by, path.read_text(), flags=re.MULTILINE)
    assert count == 1, f"{path} has {count} lines like {pattern}"
    path.write_text(text)
