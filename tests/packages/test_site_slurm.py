# SPDX-License-Identifier: Apache-2.0
"""Packages for a Slurm that a site has built into /opt: here with the headers of Debian 12's Slurm."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest
from debs import LIMIT_S, run

PLUGINS = "opt/slurm/lib/slurm"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * LIMIT_S)]


def one(built: Path, name: str) -> Path:
    (found,) = built.glob(f"{name}_*.deb")
    return found


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    headers = Path(run("packaging/tree", "bookworm", "slurm").strip()) / "usr/include"
    folder = tmp_path_factory.mktemp("opt")
    run(
        *("packaging/build", "--slurm-include", headers, "--plugin-dir", f"/{PLUGINS}"),
        *("--output", folder),
    )
    return folder


def plugin_version(plugin: Path) -> int:
    """The number in a plugin that Slurm's loader compares (slurm/spank.h, SPANK_PLUGIN)."""
    symbols = run("readelf", "--wide", "--dyn-syms", plugin)
    (address,) = re.findall(r"^ *\d+: ([0-9a-f]+) .* plugin_version$", symbols, re.MULTILINE)
    sections = run("readelf", "--wide", "--sections", plugin)
    start, offset = re.findall(r" \.rodata +PROGBITS +([0-9a-f]+) ([0-9a-f]+)", sections)[0]
    place = int(address, 16) - int(start, 16) + int(offset, 16)
    (number,) = struct.unpack_from("<I", plugin.read_bytes(), place)
    return int(number)


def test_the_plugin_is_for_that_release_and_in_its_folder(built: Path, tmp_path: Path) -> None:
    run("dpkg-deb", "-x", one(built, "vhpc-spank-plugin"), tmp_path)
    (plugin,) = tmp_path.glob("**/vhpc.so")
    assert plugin.relative_to(tmp_path) == Path(PLUGINS) / "vhpc.so"
    # Debian 12 has Slurm 22.05.8
    assert plugin_version(plugin) == 0x160508


def depends(package: Path) -> list[str]:
    return [part.split()[0] for part in run("dpkg-deb", "-f", package, "Depends").split(", ")]


def test_nothing_depends_on_slurm_of_debian(built: Path) -> None:
    plugin = one(built, "vhpc-spank-plugin")
    assert run("dpkg-deb", "-f", plugin, "Version").endswith("+slurm22.05\n")
    assert "for Slurm 22.05:" in run("dpkg-deb", "-f", plugin, "Description")
    for name in ("vhpc-spank-plugin", "vhpc-node", "vhpc-client", "vhpc-controller", "vhpc-common"):
        assert [found for found in depends(one(built, name)) if found.startswith("slurm")] == []
