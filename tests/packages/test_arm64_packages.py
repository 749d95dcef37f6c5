# SPDX-License-Identifier: Apache-2.0
"""Packages for arm64: cross-built for each suite.

VHPC_PACKAGES_ARM64=DIR: those for Debian 13 that ``packaging/build`` has written there already.
VHPC_PACKAGES_BOOKWORM_ARM64=DIR: the same for Debian 12.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from debs import BOOKWORM, LIMIT_S, NAMES, TRIXIE, Suite, run
from vmimages.foreign import main as problem

from vhpc_slurm.architecture import AARCH64

ARCH = AARCH64.debian
PROGRAMS = {
    "vhpc-client": "/usr/libexec/vhpc/vhpc-sbcast",
    "vhpc-controller": "/usr/libexec/vhpc/prolog-slurmctld",
    "vhpc-image-tools": "/usr/libexec/vhpc/vhpc-agent",
    "vhpc-node": "/usr/libexec/vhpc/vhpc-confine",
    "vhpc-spank-plugin": "/usr/lib/aarch64-linux-gnu/slurm-wlm/vhpc.so",
}
"""A program of each package that has some."""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(2 * LIMIT_S),
    pytest.mark.skipif(bool(problem(ARCH)), reason=problem(ARCH)),
]


@pytest.fixture(scope="session")
def built_arm(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Suite], Path]:
    """Build the packages of a suite for arm64, once; returns their folder."""

    @cache
    def build(suite: Suite) -> Path:
        folder = tmp_path_factory.mktemp("arm64")
        given = {TRIXIE: "VHPC_PACKAGES_ARM64", BOOKWORM: "VHPC_PACKAGES_BOOKWORM_ARM64"}[suite]
        if done := os.environ.get(given):
            shutil.copytree(done, folder, dirs_exist_ok=True)
        else:
            run("packaging/build", "--arch", ARCH, "--suite", suite.name, "--output", folder)
        for symbols in folder.glob("*-dbgsym_*.deb"):
            symbols.unlink()
        return folder

    return build


def program(package: Path, path: str) -> bytes:
    """A file of a package."""
    files = subprocess.run(["dpkg-deb", "--fsys-tarfile", package], capture_output=True, check=True).stdout
    unpack = ["tar", "--extract", "--to-stdout", f".{path}"]
    return subprocess.run(unpack, input=files, capture_output=True, check=True).stdout


def test_arm64_packages_have_programs_of_arm64(built_arm: Callable[[Suite], Path], suite: Suite) -> None:
    packages = {path.name.split("_")[0]: path for path in built_arm(suite).glob("*.deb")}
    assert set(packages) == NAMES
    for name, path in packages.items():
        # on Debian 12 it has a compiled Python library
        every = name == "vhpc-common" and suite == TRIXIE
        assert run("dpkg-deb", "-f", path, "Architecture").strip() == ("all" if every else ARCH)
    for name, file in PROGRAMS.items():
        found = program(packages[name], file)
        assert found[:4] == b"\x7fELF", file
        assert int.from_bytes(found[18:20], "little") == AARCH64.elf_machine, file


def test_arm64_nodes_get_qemu_for_arm64(built_arm: Callable[[Suite], Path]) -> None:
    (node,) = built_arm(TRIXIE).glob("vhpc-node_*.deb")
    depends = run("dpkg-deb", "-f", node, "Depends")
    assert AARCH64.qemu_package in depends
    assert "qemu-system-x86" not in depends
