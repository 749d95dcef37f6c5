# SPDX-License-Identifier: Apache-2.0
"""PMI of tasks in a guest that cannot work: what is refused, and what is not touched."""

from __future__ import annotations

import socket
import struct
import subprocess
import time
from contextlib import closing
from threading import Thread
from typing import TYPE_CHECKING

import pytest
from pmi_rig import CLIENT, INIT, USE_PMI, WAIT_S, Server, free_port, in_step, join_network, pmi_step

from pace import limit
from vhpc_slurm.node.guest import wire

if TYPE_CHECKING:
    from pathlib import Path

    from guest_rig import Guest

pytest_plugins = ["guest_rig", "pmi_rig"]


SEVERAL = [
    {"SLURM_STEP_NUM_NODES": "2"},
    {"VHPC_JOB_GUESTS": "2"},
]


@pytest.mark.parametrize("several", SEVERAL)
def test_pmi_between_guests_without_a_network_is_refused(guest: Guest, several: dict[str, str]) -> None:
    step = pmi_step() | several
    with closing(Server()) as server:
        first = in_step(guest, step, "python3", "-c", USE_PMI, server=server)
    assert (first.returncode, first.stdout) == (126, b"before\n")
    assert first.stderr.startswith(b"vhpc: step 42.1 runs an MPI program in several tasks")
    assert b"srun --mpi=pmi2" in first.stderr
    assert b"--vhpc-network=job" in first.stderr
    assert first.stderr.count(b"\n") == 1
    assert server.asked == []
    with closing(Server()) as server:
        second = in_step(guest, step, "python3", "-c", USE_PMI, server=server)
    assert (second.returncode, second.stdout, second.stderr) == (126, b"before\n", b"")
    with closing(Server()) as server:
        another = in_step(guest, step | {"SLURM_STEP_ID": "2"}, "python3", "-c", USE_PMI, server=server)
    assert another.stderr.startswith(b"vhpc: step 42.2 ")


@pytest.mark.parametrize("several", SEVERAL)
def test_pmi_between_guests_with_a_network_is_relayed(
    guest: Guest, server: Server, several: dict[str, str]
) -> None:
    join_network(guest)
    argv = ("python3", "-c", CLIENT, INIT, "cmd=finalize")
    done = in_step(guest, pmi_step() | several, *argv, server=server)
    assert (done.returncode, done.stderr) == (0, b"")
    assert server.asked == [INIT, "cmd=finalize"]


@pytest.mark.parametrize("joined", [None, "2", "x", ""])
def test_components_without_a_common_network_are_refused(
    guest: Guest, server: Server, joined: str | None
) -> None:
    join_network(guest)
    step = pmi_step(SLURM_STEP_NUM_TASKS="2", SLURM_HET_SIZE="3")
    if joined is not None:
        step["VHPC_RUN_COMPONENTS"] = joined
    done = in_step(guest, step, "python3", "-c", USE_PMI, server=server)
    assert done.returncode == 126
    assert b"the components of this heterogeneous job have no network in common" in done.stderr
    assert server.asked == []


def test_components_with_a_common_network_have_pmi(guest: Guest, server: Server) -> None:
    join_network(guest)
    step = pmi_step(SLURM_STEP_NUM_NODES="2", SLURM_HET_SIZE="2", VHPC_RUN_COMPONENTS="2")
    argv = ("python3", "-c", CLIENT, INIT, "cmd=finalize")
    done = in_step(guest, step, *argv, server=server)
    assert (done.returncode, done.stderr) == (0, b"")
    assert server.asked == [INIT, "cmd=finalize"]


# Says each argument to the server, which may have closed its end, as MPICH does: a signal ends it then.
TWICE = """
import os, socket, sys, time
link = socket.socket(fileno=int(os.environ["PMI_FD"]))
for word in sys.argv[1:]:
    link.sendall(word.encode().replace(b"|", b"\\n"))
    if not link.recv(1000):
        time.sleep(60)
print("went on", flush=True)
time.sleep(60)
"""


@pytest.mark.promise("mpi.refuse")
@pytest.mark.parametrize(
    ("words", "what"),
    [
        ((f"{INIT}|", "cmd=finalize|", f"{INIT}|"), "runs a second MPI program in one task"),
        ((f"{INIT}|", "mcmd=spawn|nprocs=1|execname=./x|endcmd|"), "calls MPI_Comm_spawn"),
    ],
    ids=["twice", "spawn"],
)
def test_requests_that_slurms_pmi_lacks_are_refused(
    guest: Guest, tmp_path: Path, words: tuple[str, ...], what: str
) -> None:
    """After a spawn the step is ended as well: the other tasks wait for it."""
    scancel = tmp_path / "host" / "scancel"
    scancel.parent.mkdir()
    scancel.write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/ended\n')
    scancel.chmod(0o755)
    step = pmi_step(VHPC_RUN_COMMAND_PATH=str(scancel.parent))
    for line in (1, 0):
        with closing(Server()) as server:
            done = in_step(guest, step, "python3", "-c", TWICE, *words, server=server)
        assert (done.returncode, done.stdout) == (126, b"")
        assert done.stderr.count(b"\n") == line, "once for the tasks of a step in this guest"
        assert done.stderr.startswith(f"vhpc: step 42.1 {what}".encode()) or line == 0
    assert (tmp_path / "ended").exists() == ("spawn" in what)


# A PMIx client's first message and its requests (OpenPMIx, src/mca/ptl/ptl_types.h): sender, tag, length and
# padding; the length of the first one is in the byte order of the host.
GREETING = struct.pack("=IIII", 2**32 - 1, 2**32 - 1, 6, 0) + b"native"


def request(content: bytes) -> bytes:
    return struct.pack(">IIII", 3, 117, len(content), 0) + content


# One command (its count as a number of flexible length, or as an int32), then what it is about.
FLEXIBLE, FIXED = b"\x02", b"\0\0\0\x01"
SPAWN, PUBLISH = b"\x09", b"\x06"
PORT = b"\x02\x33" + b"2719678465.0:1804289383:%s\0\x06"
# Open MPI's text (ompi/mpi/help-mpi-api.txt) if its user has switched MPI_Comm_spawn off: command 16, "log".
HELP = (
    b"\x10\0\0-----\nYour application has invoked an MPI function that is not supported in\n"
    b"this environment.\n\n"
    b"  MPI function: MPI_Comm_spawn_multiple\n  Reason:       Enabled\n-----\n\0"
)
ASKS = {
    "spawn": (FLEXIBLE + SPAWN + b"\0\x15\x02", "MPI_Comm_spawn"),
    "spawn of PMIx 3": (FIXED + SPAWN + b"\0\0\0\x01\0\0", "MPI_Comm_spawn"),
    "accept": (FLEXIBLE + PUBLISH + PORT % b"accept", "MPI_Comm_accept"),
    "connect": (FLEXIBLE + PUBLISH + PORT % b"connect", "MPI_Comm_connect"),
    "switched off": (FLEXIBLE + HELP, "MPI_Comm_spawn_multiple"),
}
ASK = """
import os, socket, sys, time
port = int(os.environ["PMIX_SERVER_URI41"].rpartition(":")[2])
link = socket.create_connection(("127.0.0.1", port))
for message in sys.argv[1:]:
    link.sendall(bytes.fromhex(message))
    assert link.recv(5) == b"hello"
time.sleep(60)
"""


@pytest.mark.promise("mpi.refuse")
@pytest.mark.parametrize("ask", ASKS)
def test_requests_that_slurms_pmix_lacks_are_refused(guest: Guest, tmp_path: Path, ask: str) -> None:
    """Slurm's server would answer with an error, and Open MPI would then end the step without a reason."""
    scancel = tmp_path / "host" / "scancel"
    scancel.parent.mkdir()
    scancel.write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/ended\n')
    scancel.chmod(0o755)
    said = [GREETING, request(FLEXIBLE + b"\x02"), request(ASKS[ask][0])]
    heard = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with listener.accept()[0] as link:
                for message in said[:2]:
                    heard.append(link.recv(len(message), socket.MSG_WAITALL))
                    link.sendall(b"hello")
                heard.append(link.recv(100))

        thread = Thread(target=serve)
        thread.start()
        step = pmi_step(listener.getsockname()[1], VHPC_RUN_COMMAND_PATH=str(scancel.parent))
        done = in_step(guest, step, "python3", "-c", ASK, *(message.hex() for message in said))
        thread.join(WAIT_S)
    assert (done.returncode, done.stdout, heard) == (126, b"", [*said[:2], b""])
    assert done.stderr.decode() == (
        f"vhpc: step 42.1 calls {ASKS[ask][1]}, which is not possible with srun --mpi=pmix: "
        "start the program with mpirun\n"
    )
    assert "42.1" in (tmp_path / "ended").read_text()


@pytest.mark.parametrize("number", ["0", "1", "99", "-1", "x", "", "9999999999999999999"])
def test_a_descriptor_that_slurm_has_not_opened_is_not_used(guest: Guest, number: str) -> None:
    done = in_step(guest, pmi_step(PMI_FD=number), "python3", "-c", USE_PMI)
    assert (done.returncode, done.stdout) == (126, b"before\n")
    assert b"PMI_FD is not a descriptor that Slurm has opened" in done.stderr


@pytest.mark.parametrize("kind", ["pmi2", "pmix"])
def test_a_program_without_pmi_is_not_affected(guest: Guest, kind: str) -> None:
    step = pmi_step(free_port() if kind == "pmix" else 0, SLURM_STEP_NUM_NODES="2")
    with closing(Server()) as server:
        own = server if kind == "pmi2" else None
        done = in_step(guest, step, "sh", "-c", "env; exit 3", server=own)
    assert (done.returncode, done.stderr, server.ended) == (3, b"", False)
    for name in ("PMIX_RANK", "PMIX_NAMESPACE") if kind == "pmix" else ("PMI_RANK", "PMI_SIZE"):
        assert f"{name}={step[name]}\n".encode() in done.stdout
    assert (b"\nPMIX_SERVER_URI2=pmix-server.6169;tcp4://127.0.0.1:" in done.stdout) == (kind == "pmix")


@pytest.mark.parametrize("kind", ["pmi2", "pmix"])
@pytest.mark.parametrize(
    "why",
    [
        {"SLURM_STEP_NUM_TASKS": "1"},
        {"SLURM_STEP_NUM_TASKS": "1", "SLURM_HET_SIZE": "2"},
        {"VHPC_PMI": "singleton"},
    ],
)
def test_a_single_task_and_singletons_on_purpose_have_no_pmi(
    guest: Guest, kind: str, why: dict[str, str]
) -> None:
    step = pmi_step(free_port() if kind == "pmix" else 0)
    with closing(Server()) as server:
        done = in_step(guest, step | why, "env", server=server if kind == "pmi2" else None)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"PMI_" not in done.stdout.replace(b"VHPC_PMI", b"")
    assert b"PMIX_" not in done.stdout


def test_a_wrong_value_of_vhpc_pmi_is_an_error(guest: Guest) -> None:
    done = guest.run("env", VHPC_PMI="singletons", SLURM_LOCALID="0")
    assert (done.returncode, done.stdout) == (64, b"")
    assert done.stderr == b"vhpc: VHPC_PMI=singletons: must be relay or singleton\n"


def test_an_agent_that_cannot_refuse_starts_no_task(late_guest: Guest, server: Server) -> None:
    command: list[str | Path] = [late_guest.bin / "vhpc-run", "--", "true"]
    fd = server.task.fileno()
    env = late_guest.env() | pmi_step(SLURM_STEP_NUM_NODES="2", PMI_FD=str(fd))
    run = subprocess.Popen(command, env=env, pass_fds=(fd,), stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
    end = wire.FrameStream(late_guest.agent_end)
    until = time.monotonic() + limit(WAIT_S)
    hello = wire.put(wire.Tag.VERSION_MIN, 1) + wire.put(wire.Tag.VERSION_MAX, 1)
    end.send(wire.FrameType.HELLO, hello, until)
    late_guest.agent_end.settimeout(WAIT_S)
    header = b""
    while not header or header[4] != 4:  # EXEC
        header = late_guest.agent_end.recv(16, socket.MSG_WAITALL)
        late_guest.agent_end.recv(int.from_bytes(header[:4], "little"), socket.MSG_WAITALL)
    late_guest.agent_end.sendall(struct.pack("<IBBHII", 0, 5, 0, 0, 1, 0))  # STARTED
    _, err = run.communicate(timeout=WAIT_S)
    assert run.returncode == 126
    assert b"the agent of the image is too old" in err
    header = late_guest.agent_end.recv(16, socket.MSG_WAITALL)
    assert header[4] == 13  # CLOSE
