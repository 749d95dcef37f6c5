# SPDX-License-Identifier: Apache-2.0
"""The console of a guest, given to the user at the end."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest
from controller_lab import request
from node_rig import account, node_layout
from stepd import needs_root

from vhpc_slurm.node.guest import console

pytestmark = pytest.mark.xdist_group("slurmstepd")
layout = node_layout


@pytest.mark.promise("attack.terminal")
def test_the_line_that_tells_of_the_death_is_found(tmp_path: Path) -> None:
    path = tmp_path / "console.log"
    path.write_bytes(b"\r\n[ 1.0] Kernel panic - not syncing: VFS\r\n[ 1.1] Call Trace:\r\n[ 1.2] end\r\n")
    assert console.last_words(path) == "Kernel panic - not syncing: VFS"
    path.write_bytes(b"one\r\ntwo \x1b[2J\r\n\r\n")
    assert console.last_words(path) == "two ?[2J"
    path.write_bytes(b"")
    assert console.last_words(path) == ""


OOPS = b"""\
[    1.905412] BUG: unable to handle page fault for address: ffffa0b1c0de0000\r
[    1.905412] #PF: supervisor read access in kernel mode\r
[    1.905412] Oops: Oops: 0000 [#1] PREEMPT SMP NOPTI\r
[    1.905412] CPU: 0 UID: 0 PID: 12 Comm: kworker/0:1 Not tainted 6.12.48+deb13-cloud-amd64 #1\r
[    1.905412] RIP: 0010:memcpy_orig+0x1e/0x140\r
[    1.905412] Code: 00 00\r
[    1.905412] RIP: 0010:another+0x1/0x2\r
[    1.905412] Kernel panic - not syncing: Fatal exception in interrupt\r
"""


@pytest.mark.promise("attack.terminal")
def test_a_panic_has_the_exception_before_it(tmp_path: Path) -> None:
    path = tmp_path / "console.log"
    path.write_bytes(OOPS)
    panic = "Kernel panic - not syncing: Fatal exception in interrupt"
    where = "RIP: 0010:memcpy_orig+0x1e/0x140"
    assert console.last_words(path) == f"{panic} (Oops: Oops: 0000 [#1] PREEMPT SMP NOPTI, {where})"
    path.write_bytes(
        b"[    2.1][    T1] Internal error: Oops: 96000004 [#1] SMP\r\n[  2.1] Kernel panic - x\r\n"
    )
    assert console.last_words(path) == "Kernel panic - x (Internal error: Oops: 96000004 [#1] SMP)"


def hand_over(log: Path, *targets: Path) -> list[str]:
    """Hand a console over to files; why that failed, for each."""
    requests = [request(console=str(target).replace("%", "%%")) for target in targets]
    copies = [console.hand_over([(0, log)], one, "n1", account(), 1)[0] for one in requests]
    assert [copy.target for copy in copies] == list(map(str, targets))
    return [copy.why_not for copy in copies]


@needs_root
def test_consoles_without_a_reader_share_one_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "COPY_TIMEOUT_S", 3.0)
    for parent in [tmp_path, *tmp_path.parents]:
        if str(parent).startswith("/tmp/"):
            parent.chmod(0o755)
    logs = []
    for index in range(8):
        os.mkfifo(tmp_path / (f"out.g{index}" if index else "out"), 0o666)
        logs.append((index, tmp_path / f"log{index}"))
        logs[-1][1].write_text("x" * 3000)
    for path in tmp_path.iterdir():
        os.chown(path, 2001, 2001)
    began = time.monotonic()
    copies = console.hand_over(logs, request(console=str(tmp_path / "out")), "n1", account(), 1)
    assert time.monotonic() - began < 20, "eight times 3 s, one after the other"
    assert all(copy.why_not for copy in copies)


@needs_root
@needs_root
def test_no_reader_of_a_fifo_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a reader that reads nothing, and without one; the limit of time is for what hangs."""
    monkeypatch.setattr(console, "COPY_TIMEOUT_S", 120.0)
    for parent in [tmp_path, *tmp_path.parents]:
        if str(parent).startswith("/tmp/"):
            parent.chmod(0o755)
    log, fifo = tmp_path / "console.log", tmp_path / "fifo"
    log.write_text("x" * 400_000)
    os.mkfifo(fifo)
    os.chown(fifo, 2001, 2001)
    wanted = request(console=str(fifo))
    (copy,) = console.hand_over([(0, log)], wanted, "n1", account(), 400)
    assert copy.why_not == "No such device or address"
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        (copy,) = console.hand_over([(0, log)], wanted, "n1", account(), 400)
    finally:
        os.close(reader)
    assert copy.why_not == "Resource temporarily unavailable"


@needs_root
def test_the_console_is_written_with_the_users_rights(tmp_path: Path) -> None:
    for parent in [tmp_path, *tmp_path.parents]:
        if str(parent).startswith("/tmp/"):
            parent.chmod(0o755)
    home = tmp_path / "home"
    home.mkdir()
    os.chown(home, 2001, 2001)
    log = tmp_path / "console.log"
    log.write_text("x" * 3000)
    victim = tmp_path / "victim"
    victim.write_text("root's")
    (home / "evil").symlink_to(victim)
    assert console.why_not(str(home / "out"), account()) == ""
    assert (home / "out").stat().st_mode & 0o7777 == 0o600
    assert hand_over(log, home / "out") == [""]
    assert (home / "out").stat().st_uid == 2001
    assert (home / "out").stat().st_size == 1024
    assert console.why_not(str(home / "out"), account()) == ""
    assert (home / "out").stat().st_size == 1024
    for target in (home / "evil", tmp_path / "no:thing: else" / "x", Path("/root/x")):
        reason = "No such file or directory" if "thing" in str(target) else "Permission denied"
        assert console.why_not(str(target), account()) == reason
        assert hand_over(log, target) == [reason]
    os.mkfifo(home / "fifo")
    os.chown(home / "fifo", 2001, 2001)
    assert console.why_not(str(home / "fifo"), account()) == "No such device or address"
    assert victim.read_text() == "root's"


def test_a_long_console_is_cut_in_the_middle_with_a_note(tmp_path: Path) -> None:
    path = tmp_path / "console.log"
    path.write_bytes(b"boot\n" + b"-" * 4091 + b"x" * 65536 + b"the end\n")
    subprocess.run(["fallocate", "--punch-hole", "--offset=4096", "--length=65536", path], check=True)
    fd = os.open(path, os.O_RDONLY)
    try:
        pieces = [console.read_on(fd, 5), console.read_on(fd, 1 << 20), console.read_on(fd, 1 << 20)]
        assert pieces == [(0, b"boot\n"), (0, b"-" * 4091), (65536, b"the end\n")]
        assert console.read_on(fd, 1 << 20) == (0, b"")
        with path.open("ab") as more:
            more.write(b"and after\n")
        assert console.read_on(fd, 1 << 20) == (0, b"and after\n")
    finally:
        os.close(fd)
