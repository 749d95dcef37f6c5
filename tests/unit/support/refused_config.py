# SPDX-License-Identifier: Apache-2.0
"""Configuration files that are refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from vhpc_slurm.config import load
from vhpc_slurm.errors import NodeError


def expect_refused(folder: Path, text: str, why: str) -> None:
    """A vhpc.toml with the text is refused, by an error that has ``why``."""
    path = folder / "vhpc.toml"
    path.write_text(text)
    with pytest.raises(NodeError, match=re.escape(why)):
        load(path)
