# SPDX-License-Identifier: Apache-2.0
"""Completion: the output of `vhpc complete`, and bash with it, together with a completion of Slurm's."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from completion_site import completion_site

from vhpc_slurm.cli import complete
from vhpc_slurm.cli.images.names import image_names
from vhpc_slurm.cli.main import COMMAND
from vhpc_slurm.config import Config
from vhpc_slurm.config.images import Images
from vhpc_slurm.config.policy import Rule

ROOT = Path(__file__).resolve().parents[3]
ANY = ("*",)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return completion_site(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("for", ["forward"]),
        ("image sh", ["show"]),
        ("forward ", ["8", "71"]),
        ("forward 7", ["71"]),
        ("forward 71 ", []),
        ("forward --node n1 ", ["8", "71"]),
        ("forward --n", ["--node"]),
        ("cp x 7", ["71:"]),
        ("shell own/", ["own/mine:latest"]),
        ("image show debian-h", ["debian-hpc:latest"]),
        ("plan --image debian-m", ["debian-minimal:latest"]),
        ("save 8 ", ["debian-hpc:latest", "debian-minimal:latest", "own/mine:latest"]),
        ("no-such-command ", []),
    ],
)
def test_candidates_are_those_of_the_command_line(site: Path, line: str, expected: list[str]) -> None:
    assert complete.candidates(COMMAND, line.split(" ")) == expected


def test_a_broken_site_completes_nothing(site: Path) -> None:
    (site / "squeue").write_text("#!/bin/sh\nexit 1\n")
    assert complete.candidates(COMMAND, ["forward", ""]) == []


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ((), 3),
        ((Rule(name="a", images=("debian-*",)),), 2),
        ((Rule(name="a", users=("other",), images=("x",)), Rule(name="b", images=ANY)), 3),
        ((Rule(name="a", partitions=("gpu",), images=("x",)),), 3),
    ],
)
def test_images_that_the_site_refuses_are_not_listed(
    site: Path, rules: tuple[Rule, ...], expected: int
) -> None:
    images = Images(catalog=str(site / "site"), user_catalog=f"{site}/own/{{user}}/images")
    assert len(image_names(Config(images=images, policy=rules))) == expected


SLURM = """
_sbatch() { COMPREPLY=(of-slurm "--version"); }
complete -o nospace -F _sbatch sbatch
"""


def in_bash(*words: str, before: str = "") -> list[str]:
    """What bash offers for a command line; words are divided as by COMP_WORDBREAKS."""
    listed = " ".join(f"'{word}'" for word in words)
    script = f"""
    compopt() {{ :; }}
    {before}
    . {ROOT}/completions/vhpc.bash; . {ROOT}/completions/vhpc-slurm.bash
    COMP_WORDS=({listed}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); COMP_LINE="${{COMP_WORDS[*]}}"
    [[ $(complete -p {words[0]}) =~ -F\\ ([^ ]+) ]]
    ${{BASH_REMATCH[1]}} {words[0]} "${{COMP_WORDS[-1]}}" "${{COMP_WORDS[-2]}}"
    printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr == ""
    return done.stdout.split()


def test_bash_completes_vhpc(site: Path) -> None:
    assert in_bash("vhpc", "forw") == ["forward"]
    assert in_bash("vhpc", "forward", "") == ["8", "71"]


def test_bash_completes_images_together_with_slurms_options(site: Path) -> None:
    image = ("sbatch", "-N2", "--vhpc-image", "=")
    assert in_bash(*image, "debian-m", before=SLURM) == ["debian-minimal:latest"]
    assert in_bash(*image, "debian-minimal", ":", "la", before=SLURM) == ["latest"]
    assert in_bash(*image, before=SLURM)[0] == "list"
    assert in_bash("sbatch", "x", before=SLURM) == ["of-slurm", "--version"]
    assert in_bash("sbatch", "--v", before=SLURM) == ["of-slurm", "--version", "--vhpc-image="]
    assert in_bash("sbatch", "--vh") == ["--vhpc-image="]


def test_slurms_completion_is_loaded_when_it_is_needed(site: Path) -> None:
    lazy = f"exec 3>{site}/seen; _completion_loader() {{ echo loaded >&3; {SLURM} }}"
    assert in_bash("sbatch", "--vhpc-image", "=", "own", before=lazy) == ["own/mine:latest"]
    assert (site / "seen").read_text() == ""
    assert in_bash("sbatch", "x", before=lazy) == ["of-slurm", "--version"]
    assert (site / "seen").read_text() == "loaded\n"
