# SPDX-License-Identifier: Apache-2.0
"""Root of a guest who uses host calls against the node: other servers, floods, and more than the limits."""

from __future__ import annotations

import contextlib
import select
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hostile_guest import BOTH, HostileGuest, command, frame
from pmi_rig import pmi_step

from vhpc_slurm.node.guest import wire
from vhpc_slurm.node.guest.channel import GuestChannel

if TYPE_CHECKING:
    from guest_rig import Guest

pytest_plugins = ["guest_rig", "pmi_rig"]
WAIT_S = 30
EXEC, STARTED, DATA = wire.FrameType.EXEC, wire.FrameType.STARTED, wire.FrameType.DATA
EXIT, ERROR, CLOSE = wire.FrameType.EXIT, wire.FrameType.ERROR, wire.FrameType.CLOSE
MIB = 1 << 20
CALLS_MAX = 32
"""Host calls alive in a session (docs/guest-protocol.md)."""
EXITED_0 = wire.put(wire.Tag.EXIT_CODE, 0)


@contextlib.contextmanager
def program(guest: Guest, **env: str) -> Iterator[tuple[HostileGuest, subprocess.Popen[bytes]]]:
    """A program of a step, as the hostile guest says that it runs."""
    run = guest.popen("program", **env)
    try:
        hostile = HostileGuest(guest)
        hostile.begin()
        yield hostile, run
    finally:
        run.kill()
        run.communicate()


def resident(pid: int) -> int:
    """Bytes of memory of a process."""
    line = next(
        one for one in Path(f"/proc/{pid}/status").read_text().splitlines() if one.startswith("VmRSS")
    )
    return int(line.split()[1]) << 10


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@contextlib.contextmanager
def listener() -> Iterator[tuple[socket.socket, int]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(WAIT_S)
        yield server, server.getsockname()[1]


@pytest.mark.promise("attack.relay")
@pytest.mark.parametrize("where", ["variable", "argument", "both"])
def test_a_pmix_call_reaches_the_steps_server_only(late_guest: Guest, where: str) -> None:
    """The guest names the server of another job; vhpc-run takes the one that slurmstepd has named."""
    with listener() as (own, port), listener() as (other, others):
        step = pmi_step(port)
        wish = f"pmix-server.1;tcp4://127.0.0.1:{others}"
        env = {"PMIX_SERVER_URI41": wish, "PMIX_SERVER_URI2": wish} if where != "argument" else {}
        words = ["pmix", wish, f"127.0.0.1:{others}"] if where != "variable" else ["pmix"]
        with program(late_guest, **step) as (hostile, _):
            hostile.send(frame(EXEC, command(*words, fds=bytes((0, BOTH)), **env), call=1))
            link, _ = own.accept()
            with link:
                while hostile.hear().kind != STARTED:
                    pass
                hostile.send(frame(DATA, b"x", call=1))
                assert link.recv(10) == b"x"
            assert not select.select([other], [], [], 0.2)[0]


@pytest.mark.promise("attack.relay")
def test_without_a_server_of_the_step_nothing_is_relayed(late_guest: Guest) -> None:
    """There ``pmix`` is the name of a command like any other, and not one that the site allows."""
    with listener() as (other, port):
        wish = f"pmix-server.1;tcp4://127.0.0.1:{port}"
        with program(late_guest, VHPC_RUN_COMMANDS="srun") as (hostile, _):
            body = command("pmix", fds=bytes((0, BOTH)), PMIX_SERVER_URI41=wish)
            hostile.send(frame(EXEC, body, call=1))
            while (said := hostile.hear()).kind != ERROR:
                pass
            assert b"guests may not run this command on the host" in said.payload
            assert not select.select([other], [], [], 0.2)[0]


@pytest.mark.promise("attack.call-flood")
def test_a_flood_of_calls_starts_few_programs_on_the_host(late_guest: Guest) -> None:
    """Calls that are ended at once, of a command that needs a moment for its end; then calls that are not."""
    shell = 'trap "sleep 1; exit" TERM; echo; sleep 60 & wait'
    body, rounds, each = command("sh", "-c", shell), 6, 30
    with program(late_guest, VHPC_RUN_COMMANDS="sh:true") as (hostile, run):
        most = number = 0
        for _ in range(rounds):
            calls = range(number + 1, number + each + 1)
            hostile.send(b"".join(frame(EXEC, body, call=n) for n in calls))
            waiting = set(calls)
            while waiting:
                said = hostile.hear()
                if said.kind in (DATA, ERROR):  # its trap is set, or there are too many
                    waiting.discard(said.call)
            most = max(most, len(children(run.pid)))
            hostile.send(b"".join(frame(CLOSE, call=n) for n in calls))
            number += each
        code = b""
        while code != EXITED_0:
            number += 1
            hostile.send(frame(EXEC, command("true"), call=number))
            while (said := hostile.hear()).kind not in (EXIT, ERROR) or said.call != number:
                assert run.poll() is None
                most = max(most, len(children(run.pid)))
            assert said.kind == EXIT or b"too many host commands at once in this step" in said.payload
            code = said.payload
            time.sleep(0.02)
        assert 1 < most <= CALLS_MAX
        assert resident(late_guest.shim.pid) < 64 * MIB
        assert resident(run.pid) < 64 * MIB
        with GuestChannel.connect(late_guest.socket, WAIT_S) as channel:
            channel.hello(WAIT_S)
    assert late_guest.shim.poll() is None
