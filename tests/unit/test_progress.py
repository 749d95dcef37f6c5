# SPDX-License-Identifier: Apache-2.0
"""The progress of long work: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from site_catalog import publish

from vhpc_slurm.cli import progress
from vhpc_slurm.progress import Amount, counter

PYTHON = Path(__file__).parents[2] / "python"
MIB = 1 << 20


def test_an_amount_is_a_line_with_numbers() -> None:
    assert Amount("fetched", 12 * MIB, 100 * MIB) == "fetched 12 MiB of 100 MiB (12 %)"
    assert Amount("fetched", 12 * MIB) == "fetched 12 MiB"
    assert Amount("fetched", 101 * MIB, 100 * MIB) == "fetched 100 MiB of 100 MiB (100 %)"
    assert Amount("checked", 0, 0) == "checked 0 MiB of 0 MiB (0 %)"


def test_pieces_are_summed() -> None:
    said: list[str] = []
    count = counter(said.append, "checked", 3 * MIB)
    for size in (MIB, 2 * MIB):
        count(size)
    assert said == ["checked 1 MiB of 3 MiB (33 %)", "checked 3 MiB of 3 MiB (100 %)"]


def verify(catalog: Path, *words: str, terminal: bool) -> tuple[str, str]:
    """The output of `vhpc image verify`: standard output, and standard error, which may be a terminal."""
    reader, writer = pty.openpty() if terminal else os.pipe()
    try:
        command = [sys.executable, "-m", "vhpc_slurm.cli.main", "image", "verify", "--catalog", str(catalog)]
        done = subprocess.run(
            [*command, *words],
            env={**os.environ, "PYTHONPATH": str(PYTHON)},
            stdout=subprocess.PIPE,
            stderr=writer,
            check=False,
            timeout=60,
        )
        os.set_blocking(reader, False)
        try:
            said = os.read(reader, 65536)
        except BlockingIOError:
            said = b""
    finally:
        os.close(reader)
        os.close(writer)
    return done.stdout.decode(), said.decode()


def test_a_terminal_gets_a_bar_that_is_removed_at_the_end(tmp_path: Path) -> None:
    """A root that lacks a MiB: the bar is not at its end when the work ends."""
    publish(tmp_path, "base", bytes(32 * MIB))
    (root,) = (path for path in (tmp_path / "blobs/sha256").iterdir() if path.stat().st_size > MIB)
    os.truncate(root, 31 * MIB)
    out, said = verify(tmp_path, "--json", terminal=True)
    assert json.loads(out)[0]["problem"].startswith("image base:latest is broken: root")
    assert "vhpc: [" in said
    assert " MiB of 32 MiB (" in said
    assert said.endswith(progress.CLEAR)
    assert "\n" not in said


def test_without_a_terminal_short_work_prints_nothing(tmp_path: Path) -> None:
    publish(tmp_path, "base", bytes(MIB))
    out, said = verify(tmp_path, terminal=False)
    assert out.splitlines()[1].endswith("ok")
    assert said == ""


def test_lines_take_the_place_of_a_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(progress, "DRAW_S", 0.0)
    progress.progress(Amount("fetched", MIB, 4 * MIB))
    progress.progress(Amount("fetched", 2 * MIB, 4 * MIB))
    progress.progress("publishing")
    progress.end()
    bars = [
        "######------------------ fetched 1 MiB of 4 MiB (25 %)",
        "############------------ fetched 2 MiB of 4 MiB (50 %)",
    ]
    drawn = [f"{progress.CLEAR}vhpc: [{bar.replace(' ', '] ', 1)}" for bar in bars]
    assert capsys.readouterr().err == "".join(drawn) + f"{progress.CLEAR}vhpc: publishing\n"
