# SPDX-License-Identifier: Apache-2.0
"""A guest knows the guests of its cluster; its programs see joins and leaves (real agent and shim)."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import pytest
from guest_processes import CONTROL_OPERATIONS

from vhpc_slurm.node.guest.channel import ChannelRefusedError, GuestChannel
from vhpc_slurm.node.guest.cluster import ClusterGuest, tell

if TYPE_CHECKING:
    from guest_rig import Guest

pytest_plugins = ["guest_rig"]
pytestmark = CONTROL_OPERATIONS

WAIT_S = 30
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGuest"


def numbered(number: int, slots: int = 4) -> ClusterGuest:
    """Guest of job 1000 + number, which is alone in its job."""
    high, low = divmod(number, 256)
    return ClusterGuest(
        f"n{number}-j{1000 + number}",
        1000 + number,
        f"10.200.{high}.{low}",
        f"fd76:6870:6300::{number:x}",
        slots,
    )


def give(guest: Guest, *numbers: int, keys: Sequence[str] = (KEY,)) -> None:
    with GuestChannel.connect(guest.socket, WAIT_S) as channel:
        tell(channel, "exam", 1001, [numbered(one) for one in numbers], keys, keys, 2001, WAIT_S)


@pytest.fixture
def members(guest: Guest, tmp_path: Path) -> str:
    """The command, as it is in a guest's PATH."""
    command = tmp_path / "vhpc-members"
    command.symlink_to(guest.bin / "vhpc-agent")
    return str(command)


def line(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    out: IO[bytes] | None = process.stdout
    assert out is not None
    parsed: dict[str, Any] = json.loads(out.readline())
    return parsed


def test_programs_find_the_guests_of_their_cluster(guest: Guest, members: str) -> None:
    give(guest, 1, 2)
    said = guest.run("sh", "-c", "echo $VHPC_CLUSTER_NAME $VHPC_CLUSTER_JOB; cat $VHPC_CLUSTER_HOSTFILE")
    assert said.stdout == b"exam 1001\nn1-j1001 slots=4\nn2-j1002 slots=4\n"
    listed = guest.run(members)
    assert (listed.returncode, listed.stderr) == (0, b"")
    assert [json.loads(one) for one in listed.stdout.splitlines()] == [
        {"host": "n1-j1001", "job": 1001, "ipv4": "10.200.0.1", "ipv6": "fd76:6870:6300::1", "slots": 4},
        {"host": "n2-j1002", "job": 1002, "ipv4": "10.200.0.2", "ipv6": "fd76:6870:6300::2", "slots": 4},
    ]


def test_outside_a_cluster_the_command_says_so(guest: Guest, members: str) -> None:
    stale = "/nonexistent/stale/hostfile"
    for option in ([], ["--follow"]):
        said = guest.run(members, *option, VHPC_CLUSTER_HOSTFILE=stale)
        assert said.returncode == 1
        assert said.stderr == (
            b"vhpc-members: this guest is in no cluster: submit the job with --vhpc-cluster=NAME\n"
        )
    assert guest.run("sh", "-c", "echo $VHPC_CLUSTER_NAME", VHPC_CLUSTER_NAME="stale").stdout == b"\n"


def test_a_program_can_follow_joins_and_leaves(guest: Guest, members: str) -> None:
    give(guest, 1)
    follower = guest.popen(members, "--follow")
    try:
        assert line(follower) == {
            "event": "join",
            "host": "n1-j1001",
            "job": 1001,
            "ipv4": "10.200.0.1",
            "ipv6": "fd76:6870:6300::1",
            "slots": 4,
        }
        give(guest, 1, 2)
        joined = line(follower)
        give(guest, 1)
        left = line(follower)
    finally:
        follower.terminate()
        follower.communicate(timeout=WAIT_S)
    assert (joined["event"], joined["host"]) == ("join", "n2-j1002")
    assert (left["event"], left["host"]) == ("leave", "n2-j1002")


def test_a_wrong_request_leaves_the_former_state(guest: Guest, members: str) -> None:
    give(guest, 1, 2)
    before = guest.run(members).stdout
    with pytest.raises(ChannelRefusedError, match="malformed request"):
        give(guest, 1, keys=(KEY, "two\nlines"))
    with pytest.raises(ChannelRefusedError, match="GUEST"):
        give(guest)
    assert guest.run(members).stdout == before
    assert sorted(path.name for path in guest.cluster.iterdir()) == [
        "hostfile",
        "hosts",
        "machinefile",
        "members",
    ]


def test_a_cluster_of_thousands_comes_in_several_frames(guest: Guest, members: str) -> None:
    numbers = range(1, 5001)
    give(guest, *numbers, keys=[f"{KEY}{number}" for number in numbers])
    assert len(guest.run(members).stdout.splitlines()) == len(numbers)


def test_the_command_knows_its_usage(guest: Guest, members: str) -> None:
    assert b"--follow" in subprocess.run([members, "--help"], capture_output=True, check=True).stdout
    assert subprocess.run([members, "n1"], capture_output=True, check=False).returncode == 2
    version = subprocess.run([members, "--version"], capture_output=True, check=True).stdout
    assert version.startswith(b"vhpc-members ")
