# SPDX-License-Identifier: Apache-2.0
"""The control client of a guest, and guests that are late, silent, hostile or gone."""

from __future__ import annotations

import hashlib
import os
import struct
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pace import limit
from vhpc_slurm.errors import NodeError
from vhpc_slurm.node.guest import wire
from vhpc_slurm.node.guest.channel import ChannelError, ChannelRefusedError, ChannelSilentError, GuestChannel
from vhpc_slurm.node.host.accounts import Account
from vhpc_slurm.node.store import statefile
from vhpc_slurm.options import Mount

if TYPE_CHECKING:
    from guest_rig import Guest

pytest_plugins = ["guest_rig"]

WAIT_S = 30
UP = ("sh", "-c", "echo up; exec sleep 1000")


# --- a guest that is late, silent or gone ------------------------------------


def test_a_lost_guest_is_one_line_and_125(guest: Guest) -> None:
    run = guest.popen(*UP, SLURM_JOB_ID="42", SLURMD_NODENAME="n1")
    assert run.stdout is not None
    assert run.stdout.readline() == b"up\n"
    assert guest.agent is not None
    guest.agent.terminate()  # it closes its end and says nothing more
    errors = run.communicate(timeout=WAIT_S)[1]
    assert run.returncode == 125
    assert errors == b"vhpc: the guest of job 42 on n1 is gone (channel closed)\n"


@pytest.mark.parametrize(
    ("status", "line"),
    [
        ("failed", b"vhpc: the guests of job 42 were ended on n1: somebody could listen\n"),
        ("ready", b"vhpc: the guest of job 42 on n1 is gone (channel closed)\n"),
    ],
)
def test_the_reason_for_a_guests_end_reaches_its_user(
    guest: Guest, tmp_path: Path, status: str, line: bytes
) -> None:
    state = tmp_path / "state"
    fields = {"message": "the guests of job 42 were ended on n1: somebody could listen"}
    statefile.write_state(state, fields | {"status": "ready"}, os.getuid())
    run = guest.popen(*UP, SLURM_JOB_ID="42", SLURMD_NODENAME="n1", VHPC_RUN_STATE=str(state))
    assert run.stdout is not None
    assert run.stdout.readline() == b"up\n"
    assert guest.agent is not None
    statefile.write_state(state, fields | {"status": status}, os.getuid())
    guest.agent.terminate()
    assert run.communicate(timeout=WAIT_S)[1] == line
    assert run.returncode == 125


def test_a_program_waits_for_a_guest_that_is_still_booting(late_guest: Guest) -> None:
    run = late_guest.popen("echo", "late")
    time.sleep(0.3)
    assert run.poll() is None
    late_guest.start_agent()
    assert run.communicate(timeout=WAIT_S)[0] == b"late\n"


def test_a_guest_that_stays_silent_is_given_up(late_guest: Guest) -> None:
    done = late_guest.run("true", VHPC_RUN_TIMEOUT="1")
    assert done.returncode == 125
    assert b"does not answer" in done.stderr
    with (
        GuestChannel.connect(late_guest.socket, 5) as channel,
        pytest.raises(ChannelError, match="does not answer"),
    ):
        channel.hello(0.3)


# --- the control client --------------------------------------------------------


@pytest.mark.skipif(os.getuid() != 0, reason="only root may send control operations: run as root")
def test_control_operations_answer(guest: Guest) -> None:
    with GuestChannel.connect(guest.socket, WAIT_S) as channel:
        assert channel.hello().kernel == os.uname().release
        assert channel.ping() < 5
        groups = (("alice", 2001), ("project", 4000))
        account = Account("alice", 2001, 2001, "", "/home/alice", "/bin/sh", groups)
        channel.identity("n1", account, hosts=["10.0.0.1 n1"], commands=["srun"])
        channel.mount("home", "/home/alice")
        channel.disk("/scratch", 2001, 2001)
        channel.bind(Mount("/home/alice/x", "/x", read_only=True), account)
        channel.environment(["A=1"], "")
        info = channel.ready()
        assert info.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        assert info.cpus == os.sysconf("SC_NPROCESSORS_ONLN")
        assert info.memory_kib == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 1024
        assert channel.info().sessions == 0


@pytest.mark.skipif(os.getuid() != 0, reason="only root may send control operations: run as root")
def test_an_identity_of_many_frames_arrives_whole(guest: Guest) -> None:
    hosts = [f"10.{i >> 8}.{i & 255}.1 node{i}" for i in range(20000)]
    with GuestChannel.connect(guest.socket, WAIT_S) as channel:
        channel.identity("n1", hosts=hosts)
        with pytest.raises(ChannelRefusedError, match="/etc/hosts"):
            channel.identity("n1", hosts=[*hosts, "bad\nline"])


@pytest.mark.skipif(os.getuid() != 0, reason="only root may send control operations: run as root")
def test_a_refusal_has_its_reason_and_the_channel_stays_open(guest: Guest) -> None:
    with GuestChannel.connect(guest.socket, WAIT_S) as channel:
        with pytest.raises(ChannelRefusedError, match="cannot be mounted on") as caught:
            channel.mount("t", "/etc")
        assert caught.value.errno == 22
        for path in ("/", "/var", "/usr/lib/x", "/proc", "/a/../etc", "/a//b", "a", "/a/"):
            with pytest.raises(ChannelRefusedError, match="a disk cannot be mounted on") as caught:
                channel.disk(path, 2001, 2001)
            assert caught.value.errno == 22
        account = Account("alice", 2001, 2001, "", "/home/alice", "/bin/sh", ())
        with pytest.raises(ChannelRefusedError, match="a folder cannot be mounted on /etc/x") as caught:
            channel.bind(Mount("/home/alice/x", "/etc/x", read_only=False), account)
        assert caught.value.errno == 22
        with pytest.raises(ChannelRefusedError, match="no field that this operation needs"):
            channel.disk("/scratch", 0, 0)
        with pytest.raises(ChannelRefusedError, match="each must be NAME=VALUE"):
            channel.environment(["A=1", "=B"], "")
        assert channel.ping() < 5


@pytest.mark.skipif(os.getuid() != 0, reason="only root may send control operations: run as root")
def test_variables_of_the_user_are_set_where_a_program_enters(guest: Guest) -> None:
    with GuestChannel.connect(guest.socket, WAIT_S) as channel:
        for values in (["OWN=of the guest", "TERM=own"], ["OWN=later"]):  # a second time nothing is done
            channel.environment(values, "")
        shown = "echo $OWN, $TERM, $USER"
        assert guest.run("sh", "-c", shown, OWN="of the host", USER="a").stdout == b"of the guest, own, a\n"


@pytest.mark.skipif(os.getuid() != 0, reason="only root may send control operations: run as root")
def test_programs_that_enter_start_in_the_directory_of_the_job(guest: Guest, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    with GuestChannel.connect(guest.socket, WAIT_S) as channel:
        channel.environment([], str(own))
        assert guest.run("pwd", SLURM_JOB_ID="7").stdout.decode() == f"{own}\n"
        assert guest.run("sh", "-c", "echo $VHPC_START_DIRECTORY", SLURM_JOB_ID="7").stdout == b"7\n"
        entered = guest.run("pwd", SLURM_JOB_ID="7", VHPC_START_DIRECTORY="7").stdout.decode()
        assert entered != f"{own}\n", "a step of a program that was there starts where that is"
        other = guest.run("pwd", SLURM_JOB_ID="8", VHPC_START_DIRECTORY="7").stdout.decode()
        assert other == f"{own}\n"
        own.rmdir()
        failed = guest.run("pwd", SLURM_JOB_ID="7")
        assert failed.returncode != 0
        assert f"couldn't start in {own}: No such file or directory" in failed.stderr.decode()
        assert failed.stdout == b""


@pytest.mark.skipif(os.getuid() != 0, reason="only root may send control operations: run as root")
def test_poweroff_ends_the_guest_and_its_end_is_noticed(guest: Guest) -> None:
    run = guest.popen(*UP)
    assert run.stdout is not None
    assert run.stdout.readline() == b"up\n"
    with GuestChannel.connect(guest.socket, WAIT_S) as channel:
        channel.poweroff()
        channel.wait_end(WAIT_S)
        assert guest.agent is not None
        assert guest.agent.wait(WAIT_S) == 0
        with pytest.raises(ChannelError):
            channel.ping()
    assert run.wait(WAIT_S) == 125
    run.communicate()
    assert guest.shim.wait(WAIT_S) == 0


@pytest.mark.promise("clean.poweroff")
@pytest.mark.skipif(os.getuid() != 0, reason="only root may send control operations: run as root")
def test_a_guest_that_ends_without_a_reply_has_answered(late_guest: Guest) -> None:
    """QEMU may go before it has passed on what the agent said last."""
    with GuestChannel.connect(late_guest.socket, WAIT_S) as channel:
        versions = wire.put(wire.Tag.VERSION_MIN, 1) + wire.put(wire.Tag.VERSION_MAX, 1)
        end = wire.FrameStream(late_guest.agent_end)
        end.send(wire.FrameType.HELLO, versions, time.monotonic() + WAIT_S)
        channel.hello()
        channel.poweroff()
        with pytest.raises(ChannelSilentError):
            channel.wait_end(0.2)  # it is still there
        late_guest.agent_end.close()
        channel.wait_end(WAIT_S)


@pytest.mark.skipif(os.getuid() != 0, reason="only root may send control operations: run as root")
def test_a_guest_that_refuses_to_power_off_is_not_waited_for(late_guest: Guest) -> None:
    with GuestChannel.connect(late_guest.socket, WAIT_S) as channel:
        versions = wire.put(wire.Tag.VERSION_MIN, 1) + wire.put(wire.Tag.VERSION_MAX, 1)
        end = wire.FrameStream(late_guest.agent_end)
        end.send(wire.FrameType.HELLO, versions, time.monotonic() + WAIT_S)
        channel.hello()
        channel.poweroff()
        end.receive(wire.FrameType.REQUEST, time.monotonic() + WAIT_S, "no request")
        refusal = wire.put(wire.Tag.REQUEST_ID, 1) + wire.put(wire.Tag.ERRNO, 38)
        frame = struct.pack("<IBBHII", len(refusal), wire.FrameType.REPLY, 0, 0, 1, 0) + refusal
        late_guest.agent_end.sendall(frame)
        with pytest.raises(ChannelRefusedError, match="poweroff"):
            channel.wait_end(WAIT_S)


def test_a_caller_need_not_wait_for_a_booting_guest(late_guest: Guest) -> None:
    with GuestChannel.connect(late_guest.socket, WAIT_S) as channel:
        with pytest.raises(ChannelSilentError, match="booting"):
            channel.hello(WAIT_S, wait_for_boot=False)
        late_guest.start_agent()
        assert channel.hello(WAIT_S).kernel == os.uname().release


def test_no_shim_is_the_nodes_failure(tmp_path: Path) -> None:
    with pytest.raises(NodeError, match="cannot connect"):
        GuestChannel.connect(tmp_path / "run.sock", 0.2)


@pytest.mark.promise("attack.replies")
def test_a_guest_that_talks_nonsense_is_a_channel_error(late_guest: Guest) -> None:
    with GuestChannel.connect(late_guest.socket, 5) as channel:
        late_guest.agent_end.sendall(hashlib.sha256(b"nonsense").digest())
        with pytest.raises(ChannelError, match=r"violated the channel's protocol|closed"):
            channel.hello()
    # its guest runs on until the Epilog, and the shim keeps its console short until then
    with late_guest.console.open("ab", buffering=0) as console:
        for _ in range(60):
            console.write(b"x" * 65536)
            time.sleep(0.01)
    deadline = time.monotonic() + limit(WAIT_S)
    while late_guest.console.stat().st_blocks * 512 > 5 * 65536 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert late_guest.console.stat().st_blocks * 512 <= 5 * 65536
    assert late_guest.shim.poll() is None
    late_guest.shim.terminate()
    assert late_guest.shim.wait(WAIT_S) == 3
