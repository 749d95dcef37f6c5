# SPDX-License-Identifier: Apache-2.0
"""docs/fabric.md names only what exists: keys, commands, checks, and lines that vhpcd really says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from command_tree import commands

from vhpc_slurm import config
from vhpc_slurm.fabric.opensm_options import DEFAULTS, parse_file

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs/fabric.md").read_text()
SOURCE = "\n".join(path.read_text() for path in (ROOT / "python").rglob("*.py"))


def blocks(language: str) -> list[str]:
    found = re.findall(rf"^ *```{language}\n(.*?)^ *```", TEXT, re.MULTILINE | re.DOTALL)
    return [re.sub(r"^   ", "", block, flags=re.MULTILINE) for block in found]


@pytest.mark.parametrize("block", blocks("toml"))
def test_each_configuration_is_one_that_is_read(tmp_path: Path, block: str) -> None:
    (tmp_path / "vhpc.toml").write_text(block)
    config.load(tmp_path / "vhpc.toml")


def test_each_key_exists() -> None:
    keys = {f"{section}.{key}" for section, key, _, _ in config.describe()}
    keys |= {f"{table}.{key}" for table, _, key, _, _ in config.describe_tables()}
    named = set(re.findall(r"`((?:fabric|controller)\.[a-z_.]+)", TEXT)) - {"fabric.room"}
    assert named
    assert {key for key in named if key not in keys} == set()


def test_each_command_exists() -> None:
    named = set(re.findall(r"vhpc ((?:fabric )?[a-z]+)", re.sub(r"`vhpc\.toml`", "", TEXT)))
    spoken = {one for one in named if f"`vhpc {one}" in TEXT or f"/vhpc {one}" in TEXT}
    assert {"doctor", "fabric audit", "fabric manager"} <= spoken
    assert spoken - set(commands()) == set()


def test_each_line_of_the_table_is_a_line_of_vhpcd() -> None:
    table = TEXT[TEXT.index("## Troubleshooting") : TEXT.index("## Checks on the site")]
    first = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    said = [phrase for cell in first for phrase in re.findall(r"`([^`]+)`", cell)]
    assert len(said) > 10
    for phrase in said:
        # Where a name or a number stands in the text, the source has a place for it.
        words = re.split(r" N |partition key", phrase.removesuffix(" N"))
        assert all(word.strip() in SOURCE for word in words), phrase


def test_each_option_of_opensm_exists() -> None:
    (block,) = blocks("")[:1]
    assert set(parse_file(block)) <= set(DEFAULTS)
    assert parse_file(block)
