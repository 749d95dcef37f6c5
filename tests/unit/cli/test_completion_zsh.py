# SPDX-License-Identifier: Apache-2.0
"""Completion in a real zsh on a terminal: what is in its command line after Tab."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from completion_site import ROOT, completion_site

from pace import limit

pytestmark = pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh: apt install zsh (make deps)")

START = """
PS1='> ' fpath=({mine} {others} $fpath)
autoload -Uz compinit && compinit -u -D
zle-line-init() {{ : >{folder}/ready }}
show() {{ print -r -- "$BUFFER" >{folder}/line.new && mv {folder}/line.new {folder}/line }}
zle -N zle-line-init && zle -N show && bindkey '^I' complete-word '^T' show
"""
SLURM = """#compdef sbatch srun salloc
[[ $PREFIX == -* ]] && compadd -- --nodes= || compadd of-slurm
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return completion_site(tmp_path, monkeypatch)


def in_zsh(folder: Path, typed: str, others: str = "") -> str:
    """The command line of an interactive zsh when a text has been typed, and then Tab."""
    mine = folder / "functions"
    mine.mkdir(exist_ok=True)
    shutil.copy(ROOT / "completions/_vhpc", mine)
    (folder / ".zshrc").write_text(START.format(mine=mine, others=others, folder=folder))
    for name in ("ready", "line"):
        (folder / name).unlink(missing_ok=True)
    terminal, inside = pty.openpty()
    process = subprocess.Popen(
        ["zsh", "--no-global-rcs", "-i"],
        stdin=inside,
        stdout=inside,
        stderr=inside,
        env=os.environ | {"ZDOTDIR": str(folder), "TERM": "dumb"},
        cwd=folder,
        start_new_session=True,
    )
    os.close(inside)
    try:
        wait_for(terminal, folder / "ready")
        os.write(terminal, typed.encode() + b"\t\x14")
        wait_for(terminal, folder / "line")
        return (folder / "line").read_text().removesuffix("\n")
    finally:
        process.kill()
        process.wait()
        os.close(terminal)


def wait_for(terminal: int, path: Path) -> None:
    """Read the terminal, so that zsh can write to it, until a file is there."""
    shown, deadline = b"", time.monotonic() + limit(60)
    while not path.exists():
        assert time.monotonic() < deadline, shown.decode(errors="replace")
        if select.select([terminal], [], [], 0.05)[0]:
            shown += os.read(terminal, 65536)


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("vhpc forw", "vhpc forward "),
        ("vhpc forward 7", "vhpc forward 71 "),
        ("vhpc image show debian-h", "vhpc image show debian-hpc:latest "),
        ("vhpc cp x 7", "vhpc cp x 71:"),
        ("sbatch --vh", "sbatch --vhpc-image="),
        ("sbatch -N2 --vhpc-image=debian-m", "sbatch -N2 --vhpc-image=debian-minimal:latest "),
        ("srun --vhpc-image=debian-minimal:la", "srun --vhpc-image=debian-minimal:latest "),
        ("salloc --vhpc-image=own/", "salloc --vhpc-image=own/mine:latest "),
        ("sbatch --vhpc-image=li", "sbatch --vhpc-image=list "),
        ("sbatch job", "sbatch job.sh "),
    ],
)
def test_zsh_completes_vhpc_and_images_of_jobs(site: Path, typed: str, completed: str) -> None:
    (site / "job.sh").touch()
    assert in_zsh(site, typed) == completed


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("sbatch of", "sbatch of-slurm "),
        ("srun --no", "srun --nodes="),
        ("srun --vh", "srun --vhpc-image="),
        ("sbatch --nodes=2 --vhpc-image=debian-h", "sbatch --nodes=2 --vhpc-image=debian-hpc:latest "),
    ],
)
def test_zsh_uses_slurms_completion_for_the_other_words(site: Path, typed: str, completed: str) -> None:
    others = site / "others"
    others.mkdir()
    (others / "_slurm").write_text(SLURM)
    assert in_zsh(site, typed, str(others)).rstrip() == completed.rstrip()
