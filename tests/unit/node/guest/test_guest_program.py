# SPDX-License-Identifier: Apache-2.0
"""Root's program in a guest: its end, its output, its deadline (real agent and shim)."""

from __future__ import annotations

import errno
import os
import threading
import time
from typing import TYPE_CHECKING

import pytest
from guest_processes import CONTROL_OPERATIONS, gone

from vhpc_slurm.node.guest.program import OUTPUT_MAX, NotStartedError, ProgramChannel, ProgramEnd

if TYPE_CHECKING:
    from guest_rig import Guest

pytest_plugins = ["guest_rig"]
pytestmark = CONTROL_OPERATIONS

WAIT_S = 30.0
ENV = {"PATH": "/usr/bin:/bin", "WORD": "of the hook"}


def run(guest: Guest, *argv: str, wait_s: float = WAIT_S, stop: threading.Event | None = None) -> ProgramEnd:
    with ProgramChannel.connect(guest.socket, WAIT_S) as channel:
        return channel.run(argv, ENV, wait_s, stop or threading.Event())


def test_a_program_runs_as_root_and_its_end_is_told(guest: Guest) -> None:
    script = 'id -u; pwd; echo "$WORD" >&2; exit 3'
    assert run(guest, "/bin/sh", "-c", script) == (3, None, False, b"0\n/\nof the hook\n")
    assert run(guest, "/bin/true") == (0, None, False, b"")
    assert run(guest, "/bin/sh", "-c", "kill -ABRT $$")[:2] == (None, 6)


def test_only_the_end_of_a_long_output_is_kept(guest: Guest) -> None:
    """More than the window of a lane, so that credit has to be returned."""
    script = "head -c 5000000 /dev/zero | tr '\\0' x; echo; echo last"
    end = run(guest, "/bin/sh", "-c", script)
    assert (end.code, len(end.output)) == (0, OUTPUT_MAX)
    assert end.output.endswith(b"xx\nlast\n")
    assert end.last_lines(1) == "last"


def test_a_late_program_is_ended_with_its_children(guest: Guest) -> None:
    end = run(guest, "/bin/sh", "-c", "echo $$; sleep 1000 & echo $!; exec sleep 1000", wait_s=2)
    assert end.timed_out
    for pid in end.output.split():
        assert gone(int(pid)), "the agent ends a session whose client has gone"


def test_a_caller_can_stop_a_program(guest: Guest) -> None:
    stop, began = threading.Event(), time.monotonic()
    timer = threading.Timer(0.3, stop.set)
    timer.start()
    assert run(guest, "/bin/sleep", "1000", wait_s=600, stop=stop).timed_out
    assert time.monotonic() - began < WAIT_S
    timer.join()


@pytest.mark.parametrize(
    ("program", "number"), [("/nowhere/check", errno.ENOENT), ("/etc/passwd", errno.EACCES)]
)
def test_a_program_that_does_not_start_has_its_errno(guest: Guest, program: str, number: int) -> None:
    with pytest.raises(NotStartedError) as caught:
        run(guest, program)
    assert caught.value.errno == number


def test_a_command_of_slurm_is_refused_at_once(guest: Guest) -> None:
    agent = str(guest.bin / "vhpc-agent")
    with ProgramChannel.connect(guest.socket, WAIT_S) as channel:
        env = ENV | {"VHPC_CALL_SOCKET": str(guest.call_socket)}
        end = channel.run((agent, "--call", "srun", "hostname"), env, WAIT_S, threading.Event())
    assert end.code not in (None, 0)
    assert "a check of the guest cannot run commands of Slurm" in end.last_lines(2)


def test_lines_of_a_guest_are_printable() -> None:
    end = ProgramEnd(1, None, oom_killed=False, output=b"first\n\n \x1b[31msecond\xff\nthird\n\n")
    said = end.last_lines(2)
    assert said.endswith(" | third")
    assert "second" in said
    assert said.isprintable()
    assert os.linesep not in said
