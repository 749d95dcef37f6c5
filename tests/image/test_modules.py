# SPDX-License-Identifier: Apache-2.0
"""Modules are loaded in modprobe's order: compared with modprobe itself, on modules that depmod read."""

from __future__ import annotations

import gzip
import lzma
import shutil
import subprocess
from pathlib import Path

import pytest

from vhpc_slurm.bootfiles.errors import BootFileError
from vhpc_slurm.bootfiles.modules import LoadStep, ModuleTree, load_list, read_module

RELEASE = "6.12.0-test"
SBIN = "/usr/sbin:/sbin:/usr/bin:/bin"
# name -> (symbols it needs, soft dependencies); each module exports a symbol of its own name.
MODULES = {
    "ring": ((), ""),
    "core": (("ring",), ""),
    "pci_bus": (("core", "ring"), ""),
    "blk": (("core",), ""),
    "sum_generic": ((), ""),
    "sum_intel": ((), ""),
    "libsum": ((), "pre: sum_intel"),
    "fs": (("libsum", "blk"), ""),
    "loop_a": ((), "pre: loop_b"),
    "loop_b": ((), "post: loop_a"),
}
SOURCE = """
const char name[] __attribute__((section("__ksymtab_strings"))) = "sym_{name}";
const char info[] __attribute__((section(".modinfo"))) = "name={name}{soft}";
{externs}
void *used[] = {{ {uses} 0 }};
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A modules folder that depmod made of objects with the sections that it looks at."""
    if shutil.which("depmod", path=SBIN) is None:
        pytest.skip("kmod is not installed")
    base = tmp_path_factory.mktemp("base")
    folder = base / "lib/modules" / RELEASE
    (folder / "kernel").mkdir(parents=True)
    for name, (needs, soft) in MODULES.items():
        text = SOURCE.format(
            name=name,
            soft=f"\\0softdep={soft}" if soft else "",
            externs="".join(f"extern char sym_{need}[];" for need in needs),
            uses="".join(f"sym_{need}," for need in needs),
        )
        subprocess.run(
            ["gcc", "-xc", "-c", "-o", folder / "kernel" / f"{name.replace('_', '-')}.ko", "-"],
            input=text.encode(),
            check=True,
        )
    (folder / "modules.builtin").write_text("kernel/drivers/char/hard-wired.ko\n")
    (folder / "modules.order").write_text("")
    subprocess.run(["depmod", "-b", base, RELEASE], check=True, env={"PATH": SBIN})
    return base


def modprobe(base: Path, name: str) -> list[str]:
    """The modules that modprobe would load, in order."""
    said = subprocess.run(
        ["modprobe", "-d", base, "-S", RELEASE, "--show-depends", name],
        check=True,
        capture_output=True,
        text=True,
        env={"PATH": SBIN},
    ).stdout
    return [Path(line.split()[1]).name for line in said.splitlines() if line.startswith("insmod")]


def ours(base: Path, *names: str) -> list[LoadStep]:
    return ModuleTree.read(base / "lib/modules" / RELEASE).load_order(names)


@pytest.mark.parametrize("name", sorted(set(MODULES) - {"loop_a", "loop_b"}))
def test_order_is_modprobes(tree: Path, name: str) -> None:
    assert [step.path.name for step in ours(tree, name)] == modprobe(tree, name)


def test_several_modules_share_their_dependencies(tree: Path) -> None:
    names = [step.path.stem for step in ours(tree, "pci_bus", "fs", "blk")]
    assert sorted(names) == ["blk", "core", "fs", "libsum", "pci-bus", "ring", "sum-intel"]
    pairs = (("ring", "core"), ("core", "pci-bus"), ("core", "blk"), ("blk", "fs"), ("libsum", "fs"))
    for first, then in (*pairs, ("sum-intel", "libsum")):
        assert names.index(first) < names.index(then)


def test_soft_dependencies_may_fail_unless_asked_for(tree: Path) -> None:
    assert load_list(ours(tree, "libsum")) == "-sum-intel.ko\nlibsum.ko\n"
    assert load_list(ours(tree, "libsum", "sum-intel")) == "sum-intel.ko\nlibsum.ko\n"


def test_optional_names_and_aliases_come_first_and_may_fail(tree: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tree / "lib/modules" / RELEASE, tmp_path / RELEASE))
    with (folder / "modules.alias").open("a") as aliases:
        aliases.write("alias crypto-sum sum_generic\n")
    order = ModuleTree.read(folder).load_order
    optional = ("crypto-sum", "no-such-name")
    assert load_list(order(("libsum",), optional=optional)) == "-sum-generic.ko\n-sum-intel.ko\nlibsum.ko\n"
    assert load_list(order(("sum_generic",), optional=optional)) == "sum-generic.ko\n"


def test_circles_of_soft_dependencies_end(tree: Path) -> None:
    assert {step.path.name for step in ours(tree, "loop_a")} == {"loop-a.ko", "loop-b.ko"}


def test_a_dash_and_an_underscore_are_one(tree: Path) -> None:
    assert ours(tree, "pci-bus") == ours(tree, "pci_bus")


def test_builtin_modules_are_not_loaded(tree: Path) -> None:
    assert ours(tree, "hard_wired") == []


def test_an_unknown_module_is_refused(tree: Path) -> None:
    with pytest.raises(BootFileError, match=f"kernel {RELEASE} has no module virtio_blk"):
        ours(tree, "virtio_blk")


def test_a_folder_without_depmods_tables_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BootFileError, match="depmod did not run"):
        ModuleTree.read(tmp_path)


def test_modules_are_uncompressed(tmp_path: Path) -> None:
    data = b"\x7fELF module" * 100
    packed = {
        "a.ko": data,
        "b.ko.xz": lzma.compress(data, check=lzma.CHECK_CRC32),
        "c.ko.gz": gzip.compress(data),
    }
    if zstd := shutil.which("zstd"):
        packed["d.ko.zst"] = subprocess.run([zstd, "-qc"], input=data, capture_output=True, check=True).stdout
    for name, raw in packed.items():
        (tmp_path / name).write_bytes(raw)
        assert read_module(tmp_path / name) == data
