# SPDX-License-Identifier: Apache-2.0
"""PMI of tasks in a guest: what is relayed, and what is refused, through the real programs."""

from __future__ import annotations

import os
from contextlib import closing
from typing import TYPE_CHECKING

import pytest
from pmi_rig import CLIENT, INIT, Server, in_step, join_network, pmi_step

if TYPE_CHECKING:
    from guest_rig import Guest

pytest_plugins = ["guest_rig", "pmi_rig"]


MAPPING = "cmd=get kvsname=42.1 key=PMI_process_mapping"


def test_a_program_talks_to_the_pmi_server_of_its_task(guest: Guest, server: Server) -> None:
    argv = ("python3", "-c", CLIENT, INIT, MAPPING, "cmd=long", "cmd=finalize")
    done = in_step(guest, pmi_step(), *argv, server=server)
    assert done.stderr == b""
    assert done.stdout.decode().splitlines() == [
        "57 cmd=response_to_init rc=0 pmi_version=1 pmi_subversion=1",
        "43 cmd=get_result rc=0 value=(vector,(0,1,2))",
        "3000005 cmd=" + 56 * "x",
        "22 cmd=finalize_ack rc=0",
        "rest b''",  # the server has closed its end
    ]
    assert server.asked == [*argv[3:]]


def test_the_server_reads_no_end_of_file_when_a_program_ends(guest: Guest, server: Server) -> None:
    done = in_step(guest, pmi_step(), "python3", "-c", CLIENT, INIT, server=server)
    assert done.returncode == 0
    assert server.asked == [INIT]
    assert not server.ended


def test_the_server_reads_no_end_of_file_of_a_killed_program(guest: Guest, server: Server) -> None:
    script = f"echo {INIT} >&$PMI_FD; kill -9 $$"
    assert in_step(guest, pmi_step(), "bash", "-c", script, server=server).returncode == -9
    assert (server.asked, server.ended) == ([INIT], False)


def test_each_task_has_its_own_descriptor_in_the_guest(guest: Guest) -> None:
    for count in (3, 30):  # numbers of slurmstepd differ between tasks and nodes
        spare = [os.dup(0) for _ in range(count)]
        with closing(Server()) as server:
            done = in_step(guest, pmi_step(), "sh", "-c", "echo $PMI_FD; ls /proc/self/fd", server=server)
        for fd in spare:
            os.close(fd)
        number, *open_fds = done.stdout.decode().split()
        assert number in open_fds
        assert len(open_fds) == 5  # 0 to 2, this one, and that of ls


def test_commands_on_the_host_do_not_inherit_the_descriptor(guest: Guest, server: Server) -> None:
    listing = 'for fd in /proc/self/fd/*; do readlink $fd; done; echo "host $PMI_FD"'
    argv = (str(guest.bin / "vhpc-agent"), "--call", "sh", "-c", listing)
    done = in_step(guest, pmi_step(VHPC_RUN_COMMANDS="sh"), *argv, server=server)
    assert done.stdout.endswith(b"host 3\n"), done.stderr
    assert b"socket" not in done.stdout


@pytest.mark.parametrize(
    ("guests", "tasks", "old", "new"),
    [
        (2, 4, "(vector,(0,2,2))", "(vector,(0,4,1))"),
        (2, 8, "(vector,(0,2,4))", "(vector,(0,4,2))"),
        (3, 4, "(vector,(0,1,4))", "(vector,(0,1,2),(1,2,1))"),
        (2, 4, "(vector,(0,2,", "(vector,(0,4,1))"),
    ],
)
def test_with_several_guests_each_is_a_node_of_the_mapping(
    guest: Guest, guests: int, tasks: int, old: str, new: str
) -> None:
    join_network(guest)
    step = pmi_step(VHPC_JOB_GUESTS=str(guests), SLURM_STEP_NUM_TASKS=str(tasks), PMI_SIZE=str(tasks))
    with closing(Server(mapping=old)) as server:
        argv = ("python3", "-c", CLIENT, INIT, MAPPING, "cmd=long", "cmd=finalize")
        done = in_step(guest, step, *argv, server=server)
    assert done.stdout.decode().splitlines()[1:] == [
        f"{len('cmd=get_result rc=0 value=') + len(new) + 1} cmd=get_result rc=0 value={new}",
        "3000005 cmd=" + 56 * "x",
        "22 cmd=finalize_ack rc=0",
        "rest b''",
    ], done.stderr
