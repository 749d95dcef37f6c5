# SPDX-License-Identifier: Apache-2.0
"""vhpc image build: which builder it starts, with which recipe, for which catalogue."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from vhpc_command import Vhpc

from vhpc_slurm.cli import context
from vhpc_slurm.cli.images import build as imagebuild
from vhpc_slurm.cli.main import main

ROOT = Path(__file__).parents[4]
RECIPE = ROOT / "vmimages/recipes/debian-minimal.toml"
PROGRAMS = ("--cache", "c", "--agent", "g", "--init", "i")


@pytest.fixture
def started(vhpc: Vhpc, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command that a run of ``build`` started; users have catalogues of their own."""
    argv: list[str] = []

    def execv(_program: str, words: list[str]) -> None:
        argv.extend(words)
        raise SystemExit(0)

    monkeypatch.setattr(os, "execv", execv)
    path = vhpc.folder / "vhpc.toml"
    path.write_text(path.read_text().replace("[images]", '[images]\nuser_catalog = "/home/{user}/c"'))
    return argv


def build(*words: str) -> None:
    with pytest.raises(SystemExit):
        main(("image", "build", *words))


def test_a_recipe_of_vhpc_is_found_by_its_name(vhpc: Vhpc, started: list[str]) -> None:
    build("debian-minimal", "mine:2")
    site = vhpc.folder / "catalog"
    assert started == [
        sys.executable,
        str(ROOT / "vmimages/build"),
        str(RECIPE),
        f"--output={site}",
        "--name=mine",
        "--tag=2",
    ]


def test_own_names_go_into_the_users_catalogue(started: list[str]) -> None:
    build(str(RECIPE), "own/mine")
    output = f"--output=/home/{context.user_name()}/c"
    assert started[2:] == [str(RECIPE), output, "--name=mine", "--tag=latest", "--own"]


@pytest.mark.parametrize("is_root", [True, False])
def test_without_a_name_the_owner_decides(
    vhpc: Vhpc, started: list[str], monkeypatch: pytest.MonkeyPatch, is_root: bool
) -> None:
    monkeypatch.setattr(context, "is_root", lambda: is_root)
    monkeypatch.setattr(os, "geteuid", lambda: 0 if is_root else 65534)
    build("debian-minimal")
    own = [f"--output=/home/{context.user_name()}/c", "--own"]
    assert started[3:] == ([f"--output={vhpc.folder / 'catalog'}"] if is_root else own)


def test_options_of_the_builder_are_passed(started: list[str], tmp_path: Path) -> None:
    words = ["--refresh", "--mirror", "http://a", "--security-mirror", "http://b", "--json"]
    words += ["--label", "team/owner=a b", "--label", "x="]
    build("debian-minimal", "--catalog", str(tmp_path), *words, "--arch=aarch64", *PROGRAMS)
    mirrors = ["--mirror=http://a", "--security-mirror=http://b"]
    others = ["--cache=c", "--arch=aarch64", "--agent=g", "--init=i", "--label=team/owner=a b", "--label=x="]
    others += ["--refresh", "--json"]
    assert started[3:] == [f"--output={tmp_path}", *mirrors, *others]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("debian-none",), "vhpc has: debian-cloud, debian-hpc, debian-minimal"),
        (("debian-minimal", f"a@sha256:{'0' * 64}"), "it has a digest"),
        (("debian-minimal", "A b"), "is not an image name"),
        (("debian-minimal", "own/a", "--catalog", "/x"), "one command works on one catalogue"),
    ],
)
def test_a_mistake_is_one_line(vhpc: Vhpc, started: list[str], words: tuple[str, ...], says: str) -> None:
    vhpc("image", "build", *words, code=1)
    assert says in vhpc.error
    assert not started


def test_a_missing_builder_is_reported(
    vhpc: Vhpc, started: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(imagebuild, "CHECKOUT", tmp_path)
    path = vhpc.folder / "vhpc.toml"
    path.write_text(path.read_text().replace("[paths]", f'[paths]\nlibexec = "{tmp_path}/libexec"'))
    vhpc("image", "build", "debian-minimal", code=1)
    assert f"this host has no image builder: {tmp_path}/libexec/vmimages/build does not exist" in vhpc.error
    (tmp_path / "libexec").mkdir()
    (tmp_path / "libexec/vmimages").symlink_to(ROOT / "vmimages")
    build("debian-minimal", "mine")
    assert started[1] == f"{tmp_path}/libexec/vmimages/build"


def test_the_builder_has_these_options_and_errors(vhpc: Vhpc, tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text(RECIPE.read_text().replace("[image]", "[imago]"))
    command = [sys.executable, "-m", "vhpc_slurm.cli.main", "image", "build", str(recipe), "mine:2"]
    options = ["--refresh", "--mirror=http://a", "--cache=c", "--agent=g", "--init=i", "--json"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "python")}
    done = subprocess.run([*command, *options], capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"vmimages/build: {recipe} is not a valid recipe: unknown key imago (see docs/image-format.md)\n"
    )
