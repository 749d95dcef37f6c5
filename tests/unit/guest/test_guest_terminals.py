# SPDX-License-Identifier: Apache-2.0
"""Programs in a guest on a terminal: its size, its signals, and job control."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from guest_processes import WAIT_S, on_a_terminal

from pace import limit

if TYPE_CHECKING:
    from guest_rig import Guest

pytest_plugins = ["guest_rig"]


def _is_stopped(pid: int) -> bool:
    """By a signal, or where the system has cgroup v2 with its cgroup."""
    if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
        return True
    own = Path(f"/proc/{pid}/cgroup").read_text().splitlines()[-1].removeprefix("0::").lstrip("/")
    places = [Path("/sys/fs/cgroup/unified") / own, Path("/sys/fs/cgroup") / own]
    events = [place / "cgroup.events" for place in places]
    return any("frozen 1" in event.read_text() for event in events if event.exists())


def _becomes(pid: int, stopped: bool) -> bool:
    """Whether the process stops, or continues, within some seconds."""
    until = time.monotonic() + limit(WAIT_S)
    while _is_stopped(pid) != stopped and time.monotonic() < until:
        time.sleep(0.05)
    return _is_stopped(pid) == stopped


@pytest.fixture
def catcher(guest: Guest) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A program that catches SIGTSTP, and has just done so: its relay and its own pid."""
    script = "trap 'echo caught' TSTP; echo $$; while :; do sleep 0.1; done"
    relay = guest.popen("bash", "-c", script)
    assert relay.stdout is not None
    pid = int(relay.stdout.readline())
    relay.send_signal(signal.SIGTSTP)
    assert relay.stdout.readline() == b"caught\n"
    yield relay, pid
    relay.kill()
    relay.communicate(timeout=WAIT_S)


def test_a_program_that_catches_sigtstp_stops_with_its_relay(
    catcher: tuple[subprocess.Popen[bytes], int],
) -> None:
    """As Slurm suspends: SIGTSTP to all, soon after it what cannot be caught."""
    relay, pid = catcher
    relay.send_signal(signal.SIGSTOP)
    assert _becomes(pid, stopped=True)
    relay.send_signal(signal.SIGCONT)
    assert _becomes(pid, stopped=False)


@pytest.mark.long
def test_a_program_stops_and_continues_with_its_relay(guest: Guest) -> None:
    """SIGSTOP cannot be caught, so no relay can pass it on."""
    script = "i=0; echo $$; while :; do i=$((i + 1)); echo $i >&2; sleep 0.1; done"
    relay = guest.popen("bash", "-c", script)
    assert relay.stdout is not None
    pid = int(relay.stdout.readline())
    try:
        for _ in range(2):
            relay.send_signal(signal.SIGSTOP)
            assert _becomes(pid, stopped=True)
            time.sleep(2.5)  # some looks later
            assert _is_stopped(pid)
            relay.send_signal(signal.SIGCONT)
            assert _becomes(pid, stopped=False)
    finally:
        relay.kill()
        relay.communicate(timeout=WAIT_S)


def test_a_relay_that_is_not_stopped_after_sigtstp_shows_it(
    catcher: tuple[subprocess.Popen[bytes], int],
) -> None:
    _, pid = catcher
    time.sleep(3)  # longer than the silence that is taken for a stop
    assert _becomes(pid, stopped=False)


def test_a_terminal_has_its_size_and_reads_lines(guest: Guest) -> None:
    screen, status = on_a_terminal(
        guest, ["sh", "-c", "tty; stty size; read x; echo got $x; exit 3"], b"33 101\r\n", b"hello\r"
    )
    assert b"/dev/pts/" in screen
    assert b"33 101\r\n" in screen
    assert screen.endswith(b"hello\r\ngot hello\r\n")
    assert os.waitstatus_to_exitcode(status) == 3


def test_control_c_interrupts_and_control_d_ends(guest: Guest) -> None:
    for program, key, code in (("sleep 100", b"\x03", -signal.SIGINT), ("cat", b"\x04", 0)):
        status = on_a_terminal(guest, ["sh", "-c", f"echo up; exec {program}"], b"up\r\n", key)[1]
        assert os.waitstatus_to_exitcode(status) == code
