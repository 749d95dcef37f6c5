# SPDX-License-Identifier: Apache-2.0
"""Images for another architecture than the build host's."""

from __future__ import annotations

from pathlib import Path

import pytest
from vmimages import cli, foreign, initrd, recipe
from vmimages.errors import BuildError

from vhpc_slurm.architecture import AARCH64, X86_64

RECIPE = Path(__file__).parents[2] / "vmimages/recipes/debian-minimal.toml"
# as Linux 6.1 shows what qemu-user-static 7.2 of Debian 12 registers
ENTRY = """\
enabled
interpreter /usr/libexec/qemu-binfmt/aarch64-binfmt-P
flags: POF
offset 0
magic 7f454c460201010000000000000000000200b700
mask ffffffffffffff00fffffffffffffffffeffffff
"""


@pytest.fixture(autouse=True)
def _x86_host(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (foreign, recipe):
        monkeypatch.setattr(module, "own", lambda: X86_64)
    monkeypatch.setattr(foreign, "need", lambda _tool: None)


@pytest.mark.parametrize(
    ("given", "key", "arch", "package"),
    [
        ("", "", "x86_64", "linux-image-cloud-amd64"),
        ("aarch64", "", "aarch64", "linux-image-cloud-arm64"),
        ("", "aarch64", "aarch64", "linux-image-cloud-arm64"),
        ("x86_64", "aarch64", "x86_64", "linux-image-cloud-amd64"),
    ],
)
def test_option_recipe_and_host_decide_in_this_order(
    tmp_path: Path, given: str, key: str, arch: str, package: str
) -> None:
    path = tmp_path / "r.toml"
    path.write_text(RECIPE.read_text().replace("[image]", f'[image]\narch = "{key}"' if key else "[image]"))
    found = recipe.load(path, given)
    assert (found.image.arch, found.kernel.package) == (arch, package)
    assert cli.kernel_type(found).endswith(".image" if arch == "aarch64" else ".elf")


@pytest.mark.parametrize(
    ("arch", "hint"), [("arm64", " (use aarch64)"), ("amd64", " (use x86_64)"), ("sparc", "")]
)
def test_an_unknown_architecture_is_named_as_the_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arch: str, hint: str
) -> None:
    assert cli.main([f"--arch={arch}", f"--output={tmp_path / 'catalog'}", str(RECIPE)]) == 1
    why = f"--arch={arch} is not an architecture of guests: allowed: x86_64, aarch64{hint}\n"
    assert capsys.readouterr().err.endswith(why)
    assert not (tmp_path / "catalog").exists()


def test_architectures_have_bases_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text(RECIPE.read_text().replace("{arch}", "any"))
    assert recipe.load(path, "aarch64").base_key() != recipe.load(path, "x86_64").base_key()
    with pytest.raises(BuildError, match="guests run on x86_64 and aarch64, not on 'arm64'"):
        recipe.load(path, "arm64")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("", None),
        ("enabled", "disabled"),
        ("flags: POF", "flags: PO"),
        ("flags: POF", "flags: "),
        ("b700", "f300"),
        ("7f454c460201010000000000000000000200b700", "7f45"),
        ("magic 7f454c460201010000000000000000000200b700", "extension .arm"),
    ],
)
def test_a_host_without_an_interpreter_is_told(tmp_path: Path, old: str, new: str | None) -> None:
    entry = tmp_path / "qemu-aarch64"
    if new is not None:
        entry.write_text(ENTRY.replace(old, new))
    with pytest.raises(BuildError, match="this host cannot run programs for aarch64") as caught:
        foreign.need_emulation(AARCH64, tmp_path)
    assert "qemu-user-static" in caught.value.hint
    foreign.need_emulation(X86_64, tmp_path)
    entry.write_text(ENTRY)
    foreign.need_emulation(AARCH64, tmp_path)


def test_packages_are_refused_for_other_architectures(monkeypatch: pytest.MonkeyPatch) -> None:
    """packaging/ prints the line."""
    assert foreign.main("armhf") == "unknown architecture armhf; known: amd64, arm64"
    assert foreign.main("amd64") == ""
    monkeypatch.setattr(foreign, "_is_interpreter", lambda _entry, _architecture: False)
    assert foreign.main("arm64").startswith("this host cannot run programs for aarch64: ")


def test_programs_come_from_the_cross_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(initrd, "SOURCE_TREE", tmp_path)
    (tmp_path / "CMakeLists.txt").touch()
    with pytest.raises(BuildError, match="vhpc-agent is not built for aarch64") as caught:
        initrd.program("vhpc-agent", None, AARCH64)
    assert f"-B {tmp_path}/build/arm64 " in caught.value.hint
    assert f"--toolchain {tmp_path}/cmake/aarch64.cmake" in caught.value.hint
    built = tmp_path / "build/arm64/guest/vhpc-agent"
    built.parent.mkdir(parents=True)
    built.write_bytes(Path("/bin/true").read_bytes())
    with pytest.raises(BuildError, match=f"{built} cannot be vhpc-agent: it is not for aarch64"):
        initrd.program("vhpc-agent", None, AARCH64)
