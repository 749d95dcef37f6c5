# SPDX-License-Identifier: Apache-2.0
"""PMIx of tasks in a guest: connections to the server of the step, through the real programs."""

from __future__ import annotations

import socket
from threading import Thread
from typing import TYPE_CHECKING

import pytest
from pmi_rig import USE_PMI, free_port, in_step, join_network, pmi_step

if TYPE_CHECKING:
    from collections.abc import Iterator

    from guest_rig import Guest

pytest_plugins = ["guest_rig", "pmi_rig"]


# Says its arguments on connections of their own, open at the same time; prints what comes back.
SPEAK = """
import os, socket, sys
ports = {value.rpartition(":")[2] for name, value in os.environ.items() if name.startswith("PMIX_SERVER_URI")}
print(len(ports), os.environ["PMIX_SERVER_URI41"].rpartition(":")[0], flush=True)
links = [socket.create_connection(("127.0.0.1", int(*ports))) for _ in sys.argv[1:]]
for link, word in zip(links, sys.argv[1:]):
    link.sendall(word.encode())
for link in links:
    link.shutdown(socket.SHUT_WR)
    print(link.makefile().read(), flush=True)
    link.close()
"""


@pytest.fixture
def pmix() -> Iterator[int]:
    """The port of a server that repeats what it hears in upper case, and ends when the other does."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    link = listener.accept()[0]
                except OSError:
                    return
                Thread(target=answer, args=(link,), daemon=True).start()

        def answer(link: socket.socket) -> None:
            with link:
                while data := link.recv(65536):
                    link.sendall(data.upper())

        Thread(target=serve, daemon=True).start()
        yield int(listener.getsockname()[1])
        listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.promise("pmi.server")
def test_each_connection_of_a_program_reaches_the_pmix_server(guest: Guest, pmix: int) -> None:
    words = ["one", "two" * 5000, "three"]
    done = in_step(guest, pmi_step(pmix), "python3", "-c", SPEAK, *words)
    assert done.stderr == b""
    first, *answers = done.stdout.decode().splitlines()
    assert first == "1 pmix-server.6169;tcp4://127.0.0.1"
    assert answers == [word.upper() for word in words]


def test_a_step_of_pmix_may_inherit_another_steps_pmi_fd(guest: Guest, pmix: int) -> None:
    step = pmi_step(pmix, SLURM_MPI_TYPE="pmix_v5", PMI_FD="3", PMI_RANK="7")
    assert in_step(guest, step, "python3", "-c", SPEAK, "word").stdout.endswith(b"WORD\n")


def test_a_program_of_pmix_has_modules_that_work_in_a_guest(guest: Guest, pmix: int) -> None:
    step = pmi_step(
        pmix, PMIX_GDS_MODULE="shmem2,hash", PMIX_SECURITY_MODE="munge,native", PMIX_MCA_gds="ds21"
    )
    done = in_step(guest, step, "env")
    found = dict(line.split("=", 1) for line in done.stdout.decode().splitlines() if line.startswith("PMIX_"))
    assert found["PMIX_GDS_MODULE"] == found["PMIX_MCA_gds"] == "hash"
    assert found["PMIX_SECURITY_MODE"] == found["PMIX_MCA_psec"] == "native"
    assert found["PMIX_SERVER_URI41"] == found["PMIX_SERVER_URI2"] != step["PMIX_SERVER_URI41"]


def test_open_mpi_shares_no_memory_between_guests(guest: Guest, pmix: int) -> None:
    join_network(guest)
    own = {"OMPI_MCA_btl": "self,tcp"}
    for guests, more, expected in [
        ("1", {}, set()),
        ("2", {}, {"btl=^sm", "coll=^sm,han,xhc", "osc=^sm"}),
        ("2", own, {"btl=self,tcp", "coll=^sm,han,xhc", "osc=^sm"}),
    ]:
        done = in_step(guest, pmi_step(pmix, VHPC_JOB_GUESTS=guests, **more), "env")
        found = {line.partition("OMPI_MCA_")[2] for line in done.stdout.decode().splitlines()}
        assert {word for word in found if word.startswith(("btl=", "coll=", "osc="))} == expected
        # Open MPI 4.1 aborts in MPI_Finalize if this is 0
        assert not {word for word in found if word.startswith("mpi_dynamics_enabled")}


def test_more_connections_than_calls_wait_for_each_other(guest: Guest, pmix: int) -> None:
    several = """
import os, socket
port = int(os.environ["PMIX_SERVER_URI41"].rpartition(":")[2])
links = [socket.create_connection(("127.0.0.1", port)) for _ in range(40)]
for number, link in enumerate(links):
    link.sendall(b"x%d" % number)
    link.shutdown(socket.SHUT_WR)
print([link.makefile().read() for link in links] == ["X%d" % number for number in range(40)])
"""
    done = in_step(guest, pmi_step(pmix), "python3", "-c", several)
    assert (done.stdout, done.stderr) == (b"True\n", b"")


@pytest.mark.promise("pmi.refuse")
def test_a_lost_pmix_server_ends_the_program(guest: Guest) -> None:
    done = in_step(guest, pmi_step(free_port()), "python3", "-c", USE_PMI)
    assert (done.returncode, done.stdout) == (126, b"before\n")
    assert b"the PMIx server of the step does not answer: Connection refused" in done.stderr
    assert done.stderr.count(b"\n") == 1


@pytest.mark.promise("pmi.server", "attack.relay")
@pytest.mark.parametrize(
    "uri",
    [
        "x;tcp4://10.0.0.1:7",
        "x;tcp4://127.0.0.1:0",
        "x;tcp4://127.0.0.1:7x",
        "x;unix:/tmp/s",
        "x",
        "x;tcp6://[::2]:7",
    ],
)
def test_no_other_address_is_relayed(guest: Guest, uri: str) -> None:
    step = pmi_step(1) | {"PMIX_SERVER_URI41": f"{uri}", "PMIX_SERVER_URI2": uri}
    done = in_step(guest, step, "python3", "-c", USE_PMI)
    assert (done.returncode, done.stdout) == (126, b"before\n")
    assert b"do not name one address of the node's loopback interface" in done.stderr
    two = pmi_step(free_port(), SLURM_STEP_ID="2") | {"PMIX_SERVER_URI2": "x;tcp4://127.0.0.1:1"}
    assert b"do not name one address" in in_step(guest, two, "python3", "-c", USE_PMI).stderr


def test_the_servers_end_of_a_connection_reaches_the_program(guest: Guest) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def hang_up() -> None:
            link = listener.accept()[0]
            link.recv(1)
            link.close()

        Thread(target=hang_up, daemon=True).start()
        port = int(listener.getsockname()[1])
        client = SPEAK.replace("    link.shutdown(socket.SHUT_WR)\n", "")
        done = in_step(guest, pmi_step(port), "python3", "-c", client, "hello")
    assert done.stdout.decode().splitlines()[1:] == [""], done.stderr
