# SPDX-License-Identifier: Apache-2.0
"""The `vhpc` command on jobs: consoles, timelines, what vhpcd has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from vhpc_command import Vhpc

from vhpc_slurm.cli.jobs.console import Cleaner
from vhpc_slurm.model import Generation, Stage, Timeline

ROOT = Path(__file__).parents[4]
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="reads what only root may")
no_root = pytest.mark.skipif(os.getuid() == 0, reason="refuses users, not root")


# --- consoles ----------------------------------------------------------------


@pytest.mark.promise("attack.terminal")
@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"a\r\nb\rc\n", "a\nb\nc\n"),
        (b"\x1b[1;31mred\x1b[0m \x1b]0;title\x07x\x1b(By", "red xy"),
        (b"bell\x07 back\x08 nul\x00 c1\xc2\x9b31m", "bell? back? nul? c1?31m"),
        ("grüße \u202egnp\n".encode(), "grüße ?gnp\n"),
        (b"\xff\xfe", "\ufffd\ufffd"),
        (b"open \x1b[12", "open ?[12"),
    ],
)
def test_a_console_cannot_drive_the_terminal(raw: bytes, text: str) -> None:
    for step in (1, 2, 3, len(raw)):
        cleaner = Cleaner()
        pieces = [cleaner.feed(raw[i : i + step]) for i in range(0, len(raw), step)]
        assert "".join([*pieces, cleaner.feed(b"", last=True)]) == text


@needs_root
def test_a_console_of_this_node_is_printed(vhpc: Vhpc, run_dir: str) -> None:
    guest = Path(run_dir) / "jobs/42/g1"
    guest.mkdir(parents=True)
    (guest / "console.log").write_bytes(b"\x1b[32mbooted\x1b[0m\r\n" * 20000)
    assert vhpc("console", "42", "--guest", "1") == "booted\n" * 20000
    assert vhpc.json("console", "42", "n1", "--guest", "1")["console"] == "booted\n" * 20000
    vhpc("console", "42", code=1)
    assert "guest 0 of job 42 has no console on n1" in vhpc.error
    vhpc("console", "42", "n2", code=1)
    assert "can only be read on n2: this host is n1 (run on n2: vhpc console 42)" in vhpc.error


@needs_root
def test_following_a_console_ends_when_the_job_does(vhpc: Vhpc, run_dir: str) -> None:
    guest = Path(run_dir) / "jobs/42/g0"
    guest.mkdir(parents=True)
    log = guest / "console.log"
    log.write_bytes(b"one\r\n")
    child = subprocess.Popen(
        [sys.executable, "-m", "vhpc_slurm.cli.main", "console", "42", "-f"],
        env=os.environ | {"PYTHONPATH": str(ROOT / "python")},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "one\n"
    with log.open("ab") as out:
        out.write(b"two\r\n")
    assert child.stdout.readline() == "two\n"
    log.unlink()
    assert child.wait(60) == 0


@no_root
@pytest.mark.parametrize("argv", [("plan", "42"), ("reconcile",), ("ps", "--local")])
def test_commands_for_root_refuse_other_users(vhpc: Vhpc, argv: tuple[str, ...]) -> None:
    vhpc(*argv, code=1)
    assert "needs root" in vhpc.error


# --- timelines ---------------------------------------------------------------


def boot(*stages: tuple[str, float, float, str]) -> Timeline:
    return Timeline(Generation(42, 0, "0123abcd"), "n1", tuple(Stage(*stage) for stage in stages))


def test_ready_is_when_the_last_guest_is_set_up() -> None:
    line = boot(
        ("lease", 100.0, 100.5, ""),
        ("start g0", 101.0, 102.0, ""),
        ("start g1", 102.0, 103.0, ""),
        ("setup g0", 103.0, 104.0, ""),
        ("setup g1", 103.0, 104.25, ""),
        ("power off", 200.0, 201.0, ""),
        ("release", 201.0, 201.5, "failed: x"),
    )
    assert line.ready_s == 4.25
    silent = boot(("start g0", 1.0, 2.0, ""), ("agent g0", 2.0, 9.0, "failed: silent"))
    assert silent.ready_s is None
    assert boot(("start g0", 1, 2, ""), ("start g1", 1, 2, ""), ("setup g0", 2, 3, "")).ready_s is None


@needs_root
def test_a_node_shows_its_own_timeline_without_vhpcd(vhpc: Vhpc) -> None:
    folder = vhpc.folder / "state/timeline"
    folder.mkdir(parents=True)
    for restart, offset in ((0, 0), (1, 1000)):
        (folder / f"42.{restart}.0123abcd.json").write_text(
            json.dumps(
                {
                    "generation": {"job_id": 42, "restart": restart, "nonce": "0123abcd"},
                    "node": "n1",
                    "stages": [
                        {"name": "start g0", "began": 10.0 + offset, "ended": 11.0 + offset, "detail": "why"},
                        {"name": "setup g0", "began": 11.0 + offset, "ended": 14.0 + offset, "detail": ""},
                        {"name": "release", "began": 900.0 + offset, "ended": 901.5 + offset, "detail": ""},
                    ],
                }
            )
        )
    lines = vhpc("timeline", "42").splitlines()
    assert lines[0] == "job 42, generation 42.1.0123abcd"
    assert lines[-1] == "n1: ready after 4.000 s"
    start, setup, release = (line for line in lines if line.startswith("n1  "))
    assert start.split()[:5] == ["n1", "start", "g0", "0.000", "1.000"]
    assert (start.count("█"), setup.count("█")) == (10, 30)
    assert start.index("█") < start.rindex("█") < setup.index("█")
    assert release.split()[:4] == ["n1", "release", "0.000", "1.500"]
    (node,) = vhpc.json("timeline", "42")["nodes"]
    assert (node["ready_s"], [stage["phase"] for stage in node["stages"]]) == (
        4.0,
        ["boot", "boot", "teardown"],
    )
    vhpc("timeline", "42", "--node", "n2", code=1)
    vhpc("timeline", "43", code=4)


@needs_root
def test_an_unreachable_vhpcd_is_exit_status_4(vhpc: Vhpc) -> None:
    vhpc("ps", code=4)
    vhpc("plan", "42", code=4)
