# SPDX-License-Identifier: Apache-2.0
"""Usage of programs as agents report it: true figures, absent ones, and those of hostile guests."""

from __future__ import annotations

import errno
import os
import struct
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pace import limit
from vhpc_slurm.config import Config, Paths
from vhpc_slurm.errors import VhpcError
from vhpc_slurm.model import FIGURE_MAX, Figures, Generation, GuestUsage, SharedIo
from vhpc_slurm.node import teardown
from vhpc_slurm.node.guest import usage, wire
from vhpc_slurm.node.guest.channel import ChannelError, GuestChannel
from vhpc_slurm.node.guest.usage import AskedGuest
from vhpc_slurm.node.store import usage as stored
from vhpc_slurm.node.store.journal import Entry
from vhpc_slurm.node.store.layout import Layout, domain_name

if TYPE_CHECKING:
    from guest_rig import Guest

pytest_plugins = ["guest_rig"]

WAIT_S = 30
root = pytest.mark.skipif(os.getuid() != 0, reason="only root may send control operations: run as root")
CGROUP2 = pytest.mark.skipif(
    " cgroup2 " not in Path("/proc/mounts").read_text(), reason="needs a mounted cgroup v2 file system"
)
# A child burns CPU time and holds memory; its parent says what the kernel says of both.
WORK = """
import os, resource
if os.fork() == 0:
    held = bytearray(os.urandom(1 << 20)) * 60
    sum(i for i in range(30_000_000))
    os._exit(0)
os.wait()
used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
print(sum(one.ru_utime + one.ru_stime for one in used), used[1].ru_maxrss * 1024, flush=True)
os._exit(0)
"""


def asked(guest: Guest) -> GuestUsage:
    with GuestChannel.connect(guest.socket, WAIT_S) as channel:
        return usage.ask(channel, 0, WAIT_S)


@pytest.mark.promise("usage.seff")
@root
@CGROUP2
def test_figures_of_a_step_are_those_of_its_programs(guest: Guest) -> None:
    said = [guest.run(sys.executable, "-SEc", WORK, SLURM_STEP_ID="3").stdout.split() for _ in range(2)]
    guest.run("true", SLURM_STEP_ID="4294967290")
    found = asked(guest)
    steps = {one.step: one for one in found.steps}
    assert set(steps) == {"3", "interactive"}
    assert steps["3"].tasks == 2
    cpu_s = sum(float(seconds) for seconds, _ in said)
    assert steps["3"].figures.cpu_us == pytest.approx(cpu_s * 1e6, rel=0.05, abs=1)
    assert steps["3"].figures.rss_bytes == pytest.approx(max(int(rss) for _, rss in said), rel=0.05)
    assert found.whole.cpu_us is not None
    assert found.whole.cpu_us >= sum(one.figures.cpu_us or 0 for one in found.steps)


@root
@CGROUP2
def test_a_program_that_runs_has_figures_too(guest: Guest) -> None:
    run = guest.popen("sh", "-c", "i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done; echo up; sleep 1000")
    assert run.stdout is not None
    assert run.stdout.readline() == b"up\n"
    (step,) = asked(guest).steps
    assert (step.step, step.tasks) == ("other", 1)
    assert (step.figures.cpu_us or 0) > 0
    assert step.figures.rss_bytes is None  # known when it has ended
    run.terminate()
    run.communicate(timeout=WAIT_S)


@root
@CGROUP2
def test_a_program_that_was_killed_counts(guest: Guest) -> None:
    """As scancel --signal=KILL and the end of a time limit do it: the relay has no time to say anything."""
    run = guest.popen("sh", "-c", "i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done; echo up; sleep 1000")
    assert run.stdout is not None
    assert run.stdout.readline() == b"up\n"
    run.kill()
    run.communicate(timeout=WAIT_S)
    until = time.monotonic() + limit(WAIT_S)
    while not ((steps := asked(guest).steps) and steps[0].figures.rss_bytes):
        assert time.monotonic() < until, steps
        time.sleep(0.05)
    assert [(step.step, step.tasks) for step in steps] == [("other", 1)]
    assert (steps[0].figures.cpu_us or 0) > 50_000


@root
@CGROUP2
def test_a_teardown_keeps_the_usage_of_the_guests(guest: Guest) -> None:
    paths = Paths(state=str(guest.folder / "state"), run=str(guest.folder / "run"))
    layout, generation = Layout(Config(paths=paths)), Generation(7, 0, "0123abcd")
    for index in range(2):
        layout.guest(7, index).mkdir(parents=True)
    (layout.guest(7, 0) / "root.sock").symlink_to(guest.socket)
    guest.run("true", SLURM_STEP_ID="0")
    domains = [Entry(f"domain:{n}", "domain", {"name": domain_name(generation, n), "uid": 1}) for n in (0, 1)]
    teardown.keep_usage(layout, generation, domains)
    found = stored.of_node(layout.usage(generation), generation, "n1")
    assert found is not None
    assert [step.step for step in found.guests[0].steps] == ["0"]
    assert found.guests[0].memory_kib == pytest.approx(
        os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1024, rel=0.01
    )
    assert found.guests[1].missing == "the guest had ended"


@root
def test_figures_that_the_kernel_lacks_are_absent(guest: Guest) -> None:
    """The sandbox of the tests has no controllers in cgroup v2, or those of the machine."""
    guest.run("true", SLURM_STEP_ID="0")
    (step,) = asked(guest).steps
    places = [
        Path(line.split()[1]) for line in Path("/proc/mounts").read_text().splitlines() if "cgroup2" in line
    ]
    measured = places and "memory" in (places[0] / "cgroup.subtree_control").read_text().split()
    if not measured:
        assert step.figures.peak_bytes is None
        assert step.figures.oom_kills is None


# --- hostile guests ------------------------------------------------------------------


def answering(guest: Guest, answers: list[bytes], session: int = 1) -> threading.Thread:
    """Be the agent of a guest: answer a client's request with these fields, or ENOSYS without any."""

    def speak() -> None:
        end = wire.FrameStream(guest.agent_end)
        until = time.monotonic() + limit(WAIT_S)
        versions = wire.put(wire.Tag.VERSION_MIN, 1) + wire.put(wire.Tag.VERSION_MAX, 1)
        end.send(wire.FrameType.HELLO, versions, until)
        try:
            end.receive(wire.FrameType.REQUEST, until, "no request")
        except VhpcError:
            return
        failed = 0 if answers else errno.ENOSYS
        body = wire.put(wire.Tag.REQUEST_ID, 1) + wire.put(wire.Tag.ERRNO, failed) + b"".join(answers)
        guest.agent_end.sendall(
            struct.pack("<IBBHII", len(body), wire.FrameType.REPLY, 0, 0, session, 0) + body
        )

    thread = threading.Thread(target=speak)
    thread.start()
    return thread


@pytest.fixture
def hostile(late_guest: Guest) -> Iterator[tuple[GuestChannel, list[bytes]]]:
    """A guest that answers a usage request with these fields."""
    answers: list[bytes] = []
    with GuestChannel.connect(late_guest.socket, WAIT_S) as channel:
        thread = answering(late_guest, answers)
        yield channel, answers
    late_guest.shim.terminate()
    thread.join(WAIT_S)


def row(step: bytes | None, **figures: int) -> bytes:
    inside = b"" if step is None else wire.put(wire.Tag.STEP, step)
    for name, value in figures.items():
        inside += wire.put(wire.Tag[name], struct.pack("<Q", value))
    return wire.put(wire.Tag.USAGE, inside)


@pytest.mark.promise("attack.usage")
@root
def test_impossible_figures_are_not_known(hostile: tuple[GuestChannel, list[bytes]]) -> None:
    channel, answers = hostile
    every = {field.name.upper(): 2**64 - 1 for field in fields(Figures)}
    answers += [row(None, **every), row(b"0", **(every | {"CPU_US": FIGURE_MAX - 1}))]
    answers.append(wire.put(wire.Tag.MEMORY_KIB, struct.pack("<Q", 2**64 - 1)))
    found = usage.ask(channel, 0, WAIT_S)
    assert found.whole == Figures()
    assert [step.figures for step in found.steps] == [Figures(cpu_us=FIGURE_MAX - 1)]
    assert found.memory_kib is None


@pytest.mark.promise("attack.usage")
@root
@pytest.mark.parametrize(
    "answer",
    [
        [row(b"%d" % number) for number in range(usage.ROWS_MAX + 1)],
        [row(b"\x1b[2J")],
        [row(b"a" * 32)],
        [row(b"")],
        [wire.put(wire.Tag.USAGE, b"\x80\0")],
        [wire.put(wire.Tag.USAGE, wire.put(wire.Tag.CPU_US, b"abc"))],
    ],
    ids=["rows", "escape", "long", "empty", "cut", "size"],
)
def test_a_malformed_answer_is_a_channel_error(
    hostile: tuple[GuestChannel, list[bytes]], answer: list[bytes]
) -> None:
    channel, answers = hostile
    answers += answer
    with pytest.raises(ChannelError, match="malformed message"):
        usage.ask(channel, 0, WAIT_S)


@root
def test_an_agent_that_is_too_old_is_named(late_guest: Guest) -> None:
    folder = late_guest.folder / "g0"
    folder.mkdir()
    (folder / "root.sock").symlink_to(late_guest.socket)
    thread = answering(late_guest, [], session=2)
    with GuestChannel.connect(late_guest.socket, WAIT_S) as channel:
        channel.hello(WAIT_S)  # or the guest counts as booting
    (found,) = usage.of_guests([AskedGuest(folder)])
    thread.join(WAIT_S)
    why = "the agent of the image is too old to measure: rebuild the image"
    assert found == GuestUsage(0, missing=why, shared=SharedIo(0, 0))


def test_a_guest_that_has_ended_has_no_figures(tmp_path: Path) -> None:
    began = time.monotonic()
    asked = [AskedGuest(tmp_path / f"g{index}", None) for index in range(3)]
    found = usage.of_guests(asked)
    assert found == tuple(GuestUsage(index, missing="the guest had ended") for index in range(3))
    assert time.monotonic() - began < WAIT_S


# --- the line ----------------------------------------------------------------------------


@pytest.mark.promise("usage.oom")
@pytest.mark.parametrize(
    ("memory", "kib", "had", "option"),
    [
        ({}, 353868, b"has 345 MiB for programs", b"--mem"),
        ({"SLURM_MEM_PER_CPU": "700"}, 353868, b"has 345 MiB for programs", b"--mem-per-cpu"),
        ({"SLURM_MEM_PER_GPU": "700"}, 0, b"has no more", b"--mem-per-gpu"),
    ],
)
def test_a_program_killed_for_memory_is_one_line(
    late_guest: Guest, memory: dict[str, str], kib: int, had: bytes, option: bytes
) -> None:
    """The agent's word, as docs/guest-protocol.md has it: OOM_KILLS(138) and MEMORY_KIB(66) in EXIT."""
    run = late_guest.popen("true", SLURM_JOB_ID="42", SLURM_STEP_ID="0", SLURMD_NODENAME="n1", **memory)
    end = wire.FrameStream(late_guest.agent_end)
    until = time.monotonic() + limit(WAIT_S)
    versions = wire.put(wire.Tag.VERSION_MIN, 1) + wire.put(wire.Tag.VERSION_MAX, 1)
    end.send(wire.FrameType.HELLO, versions, until)
    request = dict(wire.fields_of(end.receive(wire.FrameType.EXEC, until, "no EXEC")))
    assert request[wire.Tag.STEP] == b"0"
    started = wire.put(wire.Tag.PID, 7)
    over = wire.put(wire.Tag.EXIT_SIGNAL, 9) + wire.put(wire.Tag.CORE, 0)
    over += wire.put(wire.Tag.OOM_KILLS, struct.pack("<Q", 2))
    over += wire.put(wire.Tag.MEMORY_KIB, struct.pack("<Q", kib)) if kib else b""
    for kind, body, fd in ((5, started, 0), (7, b"", 1), (7, b"", 2), (11, over, 0)):
        late_guest.agent_end.sendall(struct.pack("<IBBHII", len(body), kind, fd, 0, 1, 0) + body)
    _, errors = run.communicate(timeout=WAIT_S)
    assert run.returncode == -9
    assert errors == (
        b"vhpc: step 42.0: a program in the guest of n1 was killed for memory (memory.events oom_kill: 2); "
        b"the guest %b: ask for more with %b, see: vhpc seff 42\n" % (had, option)
    )
