# SPDX-License-Identifier: Apache-2.0
"""A PMI server as slurmstepd has one, and programs that run as tasks of its step."""

from __future__ import annotations

import os
import socket
import subprocess
from contextlib import closing, suppress
from dataclasses import dataclass, field
from select import POLLRDHUP, poll
from threading import Thread
from typing import TYPE_CHECKING

import pytest

from vhpc_slurm.model import GuestInterface
from vhpc_slurm.node.guest.channel import GuestChannel

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from guest_rig import Guest, Saved

WAIT_S = 30


INTERFACE = GuestInterface(
    queues=1,
    mac="06:00:13:88:00:01",
    ipv4="10.200.0.2/16",
    ipv6="fd76:6870:6300::2/64",
    tap="vhpc5000g0",
)

# Says each argument to the server and prints the first 60 characters of what it answers.
CLIENT = """
import os, sys
with os.fdopen(int(os.environ["PMI_FD"]), "r+b", buffering=0) as pmi:
    stream = os.fdopen(os.dup(pmi.fileno()), "rb")
    for word in sys.argv[1:]:
        pmi.write(word.encode() + b"\\n")
        line = stream.readline().decode()
        print(len(line), line[:60].rstrip())
    rest = stream.read() if "cmd=finalize" in sys.argv else b""
    print("rest", rest)
"""
INIT = "cmd=init pmi_version=1 pmi_subversion=1"

# As MPICH begins, and as a PMIx client finds its server.
USE_PMI = """
import os, socket, sys, time
print("before", flush=True)
if "PMI_FD" in os.environ:
    os.write(int(os.environ["PMI_FD"]), b"cmd=init pmi_version=1 pmi_subversion=1\\n")
else:
    port = int(os.environ["PMIX_SERVER_URI41"].rpartition(":")[2])
    socket.create_connection(("127.0.0.1", port)).recv(1)
time.sleep(60)
"""


def pmi_step(port: int = 0, **more: str) -> dict[str, str]:
    """What slurmstepd sets for a task of two, by mpi/pmi2 or, with a port, by mpi/pmix (seen on 24.11)."""
    pmix = {
        "PMIX_NAMESPACE": "slurm.pmix.42.1",
        "PMIX_RANK": "1",
        "PMIX_SERVER_URI41": f"pmix-server.6169;tcp4://127.0.0.1:{port}",
        "PMIX_SERVER_URI2": f"pmix-server.6169;tcp4://127.0.0.1:{port}",
        "SLURM_PMIX_MAPPING_SERV": "(vector,(0,1,2))",
    }
    pmi2 = {"PMI_JOBID": "42.1", "PMI_RANK": "1", "PMI_SIZE": "2"}
    own = {
        "SLURM_JOB_ID": "42",
        "SLURM_STEP_ID": "1",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_LOCALID": "0",
    }
    return own | {"SLURM_MPI_TYPE": "pmix" if port else "pmi2"} | (pmix if port else pmi2) | more


@dataclass
class Server:
    """The end of slurmstepd: answers lines of PMI-1 as mpi/pmi2 of Slurm 24.11 does.

    As slurmstepd, it keeps the task's end open while the task runs, and must not read an end of file: from
    this mpi/pmi2 concludes that the task has sent a wrong command.
    """

    mapping: str = "(vector,(0,1,2))"
    asked: list[str] = field(default_factory=list)
    ended: bool = False

    def __post_init__(self) -> None:
        self.own, self.task = socket.socketpair()
        self._thread = Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _answer(self, line: str) -> str:
        if line.startswith("cmd=init"):
            return "cmd=response_to_init rc=0 pmi_version=1 pmi_subversion=1"
        if "key=PMI_process_mapping" in line:
            return f"cmd=get_result rc=0 value={self.mapping}"
        if line == "cmd=long":
            return "cmd=" + 3_000_000 * "x"
        return "cmd=finalize_ack rc=0" if line == "cmd=finalize" else "cmd=get_result rc=1"

    def _serve(self) -> None:
        # one that is killed has not read its answer
        with suppress(ConnectionResetError, BrokenPipeError), self.own, self.own.makefile("rw") as stream:
            for line in stream:
                self.asked.append(line.rstrip("\n"))
                stream.write(self._answer(self.asked[-1]) + "\n")
                stream.flush()
                if self.asked[-1] == "cmd=finalize":
                    return  # as _handle_finalize, which closes the socket
            self.ended = self.task.fileno() >= 0

    def close(self) -> None:
        if self.own.fileno() >= 0:
            ends = poll()
            ends.register(self.own, POLLRDHUP)
            self.ended |= bool(ends.poll(0))
        self.task.close()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()


@pytest.fixture
def server() -> Iterator[Server]:
    with closing(Server()) as it:
        yield it


def in_step(
    guest: Guest, step: dict[str, str], *argv: str, server: Server | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Run a program with the variables of a step, and a socket of its PMI server."""
    command: list[str | Path] = [guest.bin / "vhpc-run", "--", *argv]
    fds = (server.task.fileno(),) if server else ()
    env = guest.env() | step | ({"PMI_FD": str(fds[0])} if fds else {})
    done = subprocess.run(
        command, env=env, input=b"", capture_output=True, timeout=WAIT_S, check=False, pass_fds=fds
    )
    if server:
        server.close()
    return done


def join_network(guest: Guest | Saved) -> None:
    if os.getuid() != 0:
        pytest.skip("only root may send control operations: run as root")
    with GuestChannel.connect(guest.socket, WAIT_S) as channel:
        channel.network(INTERFACE, 1450, "vhpc0", ("n1", "n2"), WAIT_S)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])
