# SPDX-License-Identifier: Apache-2.0
"""scripts/slow and its record, on a small repository with parts of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
OLD = "1" * 40
PARTS = """PARTS = {
    "fuzz": Part("fuzz targets", "test ! -e .git/broken"),
    "unit": Part("slow tests", "true"),
}
"""


class Checkout:
    """A repository with scripts/slow, whose part ``fuzz`` fails while ``broken`` is true."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.record_file = folder / "packaging/slow-checks"
        self.git("init", "--quiet")
        (folder / "scripts").mkdir()
        text = (ROOT / "scripts/slow").read_text()
        text = re.sub(r"^PARTS = \{\n.*?^\}\n", PARTS, text, flags=re.MULTILINE | re.DOTALL)
        (folder / "scripts/slow").write_text(text)
        for name, output in (("deps", ""), ("pace", "echo 1.0")):
            (folder / "scripts" / name).write_text(f"#!/bin/sh\n{output}\n")
            (folder / "scripts" / name).chmod(0o755)
        self.record_file.parent.mkdir()
        self.record_file.write_text(f"# record\nunit passed 2026-01-31 {OLD} 7\n")
        self.git("add", "--all")
        self.git("commit", "--quiet", "-m", "x")
        self.commit = self.git("rev-parse", "HEAD").strip()

    def git(self, *words: str) -> str:
        who = ("-c", "user.name=x", "-c", "user.email=x@y.invalid", "-c", "commit.gpgsign=false")
        command = ["git", *who, *words]
        return subprocess.run(command, cwd=self.folder, check=True, capture_output=True, text=True).stdout

    def slow(self, *words: str, broken: bool = False) -> subprocess.CompletedProcess[str]:
        mark = self.folder / ".git/broken"
        mark.touch() if broken else mark.unlink(missing_ok=True)
        command = [sys.executable, "scripts/slow", *words]
        return subprocess.run(command, cwd=self.folder, check=False, capture_output=True, text=True)

    def record(self) -> list[str]:
        """Part, result and commit of each recorded run."""
        lines = self.record_file.read_text().splitlines()[1:]
        rows = [line.split() for line in lines]
        return [f"{row[0]} {row[1]} {row[3]}" for row in rows]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_a_pass_replaces_earlier_runs_of_its_part(checkout: Checkout) -> None:
    assert checkout.slow("fuzz", broken=True).returncode == 1
    assert checkout.record() == [f"fuzz failed {checkout.commit}", f"unit passed {OLD}"]
    done = checkout.slow("all")
    assert done.returncode == 0
    assert checkout.record() == [f"fuzz passed {checkout.commit}", f"unit passed {checkout.commit}"]


def test_a_failure_keeps_the_last_pass_on_record(checkout: Checkout) -> None:
    assert checkout.slow("fuzz").returncode == 0
    for _ in range(2):
        assert checkout.slow("--again", "fuzz", broken=True).returncode == 1
        assert checkout.record()[:2] == [f"fuzz passed {checkout.commit}", f"fuzz failed {checkout.commit}"]
    said = checkout.slow().stdout.splitlines()
    assert re.search(r"^fuzz +passed .* \(0 commits ago\), \d s; FAILED .* \(0 commits ago\)  \[", said[0])
    assert re.search(r"^unit +passed 2026-01-31 on 1{10} \(not in this clone\), 7 s  \[", said[1])


def test_a_part_that_passed_on_this_commit_is_not_run(checkout: Checkout) -> None:
    assert checkout.slow("fuzz").returncode == 0
    again = checkout.slow("fuzz", broken=True)
    assert (again.returncode, again.stdout.split(" (")[0]) == (0, "slow: fuzz has passed on this commit")


def test_a_run_with_uncommitted_changes_is_not_recorded(checkout: Checkout) -> None:
    before = checkout.record()
    (checkout.folder / "new").touch()
    done = checkout.slow("fuzz")
    assert done.returncode == 0
    assert "not recorded: there are uncommitted changes" in done.stdout
    assert checkout.record() == before


def test_an_unknown_part_is_refused(checkout: Checkout) -> None:
    done = checkout.slow("fuz")
    assert done.returncode == 2
    assert "unknown part fuz; parts: all fuzz unit" in done.stderr
