# SPDX-License-Identifier: Apache-2.0
"""Packages for arm64: cross-built for each suite; those of Debian 13 are installed and purged in emulation.

The emulated tree has what they depend on, unpacked and not configured: only maintainer scripts of vhpc run.

VHPC_PACKAGES_ARM64=DIR: those for Debian 13 that ``packaging/build`` has written there already.
VHPC_PACKAGES_BOOKWORM_ARM64=DIR: the same for Debian 12.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import xml.etree.ElementTree as ET
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from captured import unpack
from debs import BOOKWORM, LIMIT_S, NAMES, STAYS, TRIXIE, USED, Suite, run
from vhpc_command import publish
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
USAGE = ("vhpc-agent", "vhpc-confine", "vhpc-locks", "vhpc-run", "vhpc-shim")
"""Programs in C that print their usage."""
MACHINE = "128arm-2pa2n8cluster4co"
"""A capture of hwloc's tests: an Arm machine of 2 packages, in each 2 NUMA cells of 8 clusters of 4 cores."""
SITE = f"""\
[paths]
run = "/run/vhpc"
state = "/var/lib/vhpc"
[images]
catalog = "/packages/site/catalog"
store = "/packages/site/store"
[guests]
accelerator = "tcg"
qemu_group = "daemon"
[shares]
home = false
site = []
[host]
sysfs_root = "/packages/site/{MACHINE}/sys"
"""
SCRIPT = f"""\
uname -m
for name in {" ".join(USAGE)}; do /usr/libexec/vhpc/$name --help | head -n 1; done
find /usr/libexec/vhpc /usr/lib/aarch64-linux-gnu/slurm-wlm/vhpc.so -type f | while read -r file; do
    [ "$(head -c 4 "$file" | tail -c 3)" = ELF ] || continue
    ldd "$file" 2>/dev/null | grep 'not found' || echo "$file: complete"
done
vhpc doctor --help | head -n 1
vhpc inventory --sysfs-root /packages/site/{MACHINE}/sys --json >/packages/report/inventory
export VHPC_CONFIG=/packages/site/vhpc.toml
plan() {{ vhpc plan --image tiny:1 --cpus 0-7 --memory 1000 --user daemon --chdir / --node n1 "$@"; }}
plan --json >/packages/report/plan
plan --xml >/packages/report/xml
"""
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


@pytest.fixture(scope="session")
def report(built_arm: Callable[[Suite], Path]) -> Path:
    """The output of life.sh in emulation."""
    folder = built_arm(TRIXIE)
    site = folder / "site"
    site.mkdir()
    unpack(MACHINE, site)
    publish(site / "catalog", site / "store", AARCH64.name)
    (site / "vhpc.toml").write_text(SITE)
    (folder / "programs").write_text(SCRIPT)
    run(
        "packaging/trial", folder, "tests/packages/life.sh", "", "programs",
        VHPC_PACKAGES_ARCH=ARCH, VHPC_PACKAGES_TREE="tests",
    )  # fmt: skip
    return folder / "report"


def test_arm64_packages_install_and_their_programs_run(report: Path) -> None:
    said = (report / "used").read_text()
    for text in USED:
        assert text in said
    said = (report / "programs").read_text()
    lines = said.splitlines()
    assert lines[0] == "aarch64"
    assert [line.split()[:2] for line in lines[1:6]] == [["usage:", name] for name in USAGE], said
    assert "exit status" not in said
    assert (report / "audit").read_text() == ""


def test_arm64_programs_find_their_libraries(report: Path) -> None:
    said = (report / "programs").read_text()
    assert "Usage: vhpc doctor" in said
    assert f"{PROGRAMS['vhpc-spank-plugin']}: complete" in said
    assert "not found" not in said


def test_arm64_vhpc_plans_guests_on_a_captured_machine(report: Path) -> None:
    inventory = json.loads((report / "inventory").read_text())
    assert len(inventory["cpus"]) == 128
    (guest,) = json.loads((report / "plan").read_text())["guests"]
    assert guest["topology"] == {"sockets": 1, "clusters": 2, "cores": 4, "threads": 1}
    machine = ET.fromstring((report / "xml").read_text()).find("./os/type")
    assert machine is not None
    assert (machine.get("arch"), str(machine.get("machine"))[:4]) == ("aarch64", "virt")


def test_purged_arm64_packages_leave_nothing(report: Path) -> None:
    before, after = (set((report / name).read_text().splitlines()) for name in ("before", "purged"))
    assert len(before) > 3000
    assert {line.split()[-1] for line in before ^ after} <= STAYS
    assert (report / "before.names").read_text() == (report / "purged.names").read_text()
