# SPDX-License-Identifier: Apache-2.0
"""Texts of users, guests and nodes on their way to terminals, logs and Slurm: they forge and control nothing.

Guests' consoles are in ``test_cli_jobs``, web pages and reports in ``test_web_pages`` and ``test_report``.
"""

from __future__ import annotations

import io
import json
import logging
import os
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from controller_lab import HAVE_MUNGED, Munged, allocation, request
from vhpcd_fabric import Ack
from vhpcd_process import Vhpcd, make

from vhpc_slurm.bench.report import Report
from vhpc_slurm.bench.wish import Wish
from vhpc_slurm.cli import main, output
from vhpc_slurm.cli.bench import acceptance as benches
from vhpc_slurm.cli.jobs import cp as copy
from vhpc_slurm.cli.jobs import usagerows
from vhpc_slurm.cli.jobs.extract import Copied, extract
from vhpc_slurm.loglines import OneLine
from vhpc_slurm.model import Figures, JobUsage
from vhpc_slurm.slurm.sacct import AccountedJob, Accounting
from vhpc_slurm.slurm.scontrol import Scontrol

pytestmark = pytest.mark.promise("attack.log-escape")

EVIL = "x\nERROR forged\r\x1b]0;title\x07\x9b2J\x7f\x00\u200f\u202e\u2066\u2028\x85ü"
"""Ends of lines, sequences for terminals (also 8-bit ones), marks that reorder the line, and one letter."""
ALLOWED = re.compile(r"[\n -~ü?]*\Z")


def harmless(text: str, lines: int = 1) -> None:
    """Only printable characters, in so many lines; the letter is still there."""
    assert ALLOWED.match(text), repr(text)
    assert not [line for line in text.splitlines() if line.lstrip().startswith("ERROR forged")], text
    assert len(text.splitlines()) == lines, text
    assert "ü" in text


@pytest.mark.promise("attack.node-log")
def test_a_node_cannot_forge_a_line_about_figures(capsys: pytest.CaptureFixture[str]) -> None:
    """Root of a compromised node tells vhpcd why there are none."""
    usagerows.table(JobUsage(Figures(), (), 1, (("n1", 0, EVIL),)))
    harmless(capsys.readouterr().out, lines=2)


def test_json_on_a_terminal_stays_text_and_means_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    document = {EVIL: [EVIL, "😀", "\U000e0001", 1.5, None]}
    output.write_json(document)
    text = capsys.readouterr().out
    assert re.fullmatch(r"[\n -~ü😀]*", text), repr(text)
    assert json.loads(text) == document


def test_a_wrong_argument_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """As by a script that completes a name of somebody else's."""
    assert main.main([EVIL.replace("\0", "")]) == main.EXIT_USAGE
    harmless(capsys.readouterr().err)


def test_a_benchmark_in_a_guest_cannot_drive_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    wish = Wish("node", "base", 1, (), False, 1, {})
    benches._show(Report(wish, (), "", "", {}, False, (EVIL,), EVIL))
    out = capsys.readouterr().out
    harmless("\n".join(out.splitlines()[:2]), lines=2)


def test_names_of_files_that_vhpc_cp_left_out_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [EVIL.replace("\0", ""), f"a/{EVIL}".replace("\0", "")]
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as tar:
        for name in names:
            entry = tarfile.TarInfo(name)
            entry.type = tarfile.FIFOTYPE
            tar.addfile(entry)
    raw.seek(0)
    folder = os.open(tmp_path, os.O_RDONLY)
    result: Copied = extract(raw, folder, is_new=False)
    os.close(folder)
    copy._report(result)
    assert sum(result.counts.values()) == 2
    harmless(capsys.readouterr().err)


# --- logs --------------------------------------------------------------------


def test_a_traceback_in_a_log_begins_no_line() -> None:
    try:
        raise ValueError(EVIL)
    except ValueError:
        logger = logging.Logger("vhpcd")
        heard = io.StringIO()
        handler = logging.StreamHandler(heard)
        handler.setFormatter(OneLine("%(levelname)s %(message)s"))
        logger.addHandler(handler)
        logger.exception("job %s failed", EVIL)
    first, *rest = heard.getvalue().splitlines()
    harmless(first)
    assert all(re.match(r"  \| [ -~ü?]*\Z", line) for line in rest), rest
    assert any("ValueError" in line for line in rest)


@pytest.fixture
def vhpcd(tmp_path: Path, daemon: Munged) -> Iterator[Vhpcd]:
    found = make(tmp_path, daemon)
    yield found.start()
    found.stop()


@pytest.mark.promise("attack.node-log")
@pytest.mark.skipif(not HAVE_MUNGED, reason="needs munged: apt install munge")
def test_root_of_a_node_cannot_forge_lines_of_vhpcds_log(vhpcd: Vhpcd) -> None:
    """A node's report about its part of a job goes to the log, to the lease and to operators."""
    client = vhpcd.client
    generation = client.open_generation(request(), allocation()).generation
    before = len(vhpcd.log)
    client.ready(generation, "n1", "failed", error=("user", EVIL))
    client.acknowledge(Ack(generation, "n1", note=f"alarm: {EVIL}"))
    client.acknowledge(Ack(generation, "n2", clean=False, note=EVIL))
    said = vhpcd.log[before:]
    assert said.count("forged") == 3
    # no Slurm answers here, which vhpcd finds out once a minute
    lines = [line for line in said.splitlines() if not line.startswith("WARNING not reconciled: ")]
    assert all(re.match(r"(WARNING|ERROR) 42\.0\.[0-9a-f]{8} [ -~ü]*\Z", line) for line in lines), said


# --- Slurm -------------------------------------------------------------------


ENDED = AccountedJob("42", "FAILED", 1, 1, "alice", "")


@pytest.mark.parametrize("what", ["drain", "comment", "comment of ended"])
def test_slurm_gets_printable_texts_of_one_line(tmp_path: Path, what: str) -> None:
    """scontrol show prints a reason and an AdminComment as they are."""
    for name in ("scontrol", "sacctmgr", "squeue"):
        told = "echo 42 42 N/A N/A N/A" if name == "squeue" else f'printf "%s\\0" "$@" > {tmp_path}/told'
        (tmp_path / name).write_text(f"#!/bin/sh\n{told}\n")
        (tmp_path / name).chmod(0o755)
    slurm = Scontrol(str(tmp_path))
    calls: dict[str, Any] = {
        "drain": lambda: slurm.drain("n1", EVIL.replace("\0", "")),
        "comment": lambda: slurm.set_admin_comment(42, EVIL.replace("\0", "")),
        "comment of ended": lambda: Accounting(str(tmp_path)).set_comment(ENDED, EVIL.replace("\0", "")),
    }
    calls[what]()
    *_, last, end = (tmp_path / "told").read_text().split("\0")
    assert end == ""
    harmless(last)
