# SPDX-License-Identifier: Apache-2.0
"""Control groups on the real kernel of this machine: v1, v2 or both, as they are mounted."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pace import limit
from vhpc_slurm.config import Guests
from vhpc_slurm.errors import NodeError
from vhpc_slurm.model import (
    Generation,
    GuestCell,
    GuestPlan,
    GuestTopology,
    NodePlan,
    VcpuPin,
)
from vhpc_slurm.node.host import cgroup, process
from vhpc_slurm.node.host.cgroup import Cgroup, Hierarchy
from vhpc_slurm.node.host.limits import Limits, limits_of
from vhpc_slurm.node.resource import memory

GENERATION = f"{os.getpid()}.0.0123abcd"
LIMITS = Limits(memory_mib=512, helper_memory_mib=64, tasks=64, helper_tasks=32, cpus=(0,))


def usable() -> bool:
    try:
        for hierarchy in cgroup.hierarchies():
            probe = hierarchy.mount / f"vhpc-probe-{os.getpid()}"
            probe.mkdir()
            probe.rmdir()
    except OSError:
        return False
    return os.getuid() == 0 and bool(cgroup.hierarchies())


pytestmark = [
    pytest.mark.skipif(
        not usable(), reason="control groups cannot be made here: run as root, with /sys/fs/cgroup writable"
    ),
    pytest.mark.xdist_group("cgroup"),
]


@pytest.fixture
def group() -> Iterator[Cgroup]:
    made = Cgroup(GENERATION, cgroup.hierarchies(), systemd=False)
    made.create(LIMITS)
    yield made
    made.kill()
    made.remove()
    for top in cgroup.tops(cgroup.hierarchies(), systemd=False):
        with contextlib.suppress(OSError):  # busy: another checkout's tests have groups there
            top.rmdir()


def member(group: Cgroup, *argv: str) -> subprocess.Popen[bytes]:
    """Run a program as a helper of the group."""
    procs = group.entry(LIMITS).procs
    assert procs
    join = " && ".join(f"echo $$ > {path}" for path in procs)
    child = subprocess.Popen(
        ["sh", "-c", f'{join} && echo in && exec "$@"', "sh", *argv], stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"in\n"
    return child


def test_a_helper_is_in_the_group_in_every_hierarchy(group: Cgroup) -> None:
    child = member(group, "sleep", "60")
    assert group.pids() == {child.pid}
    lines = Path(f"/proc/{child.pid}/cgroup").read_text().splitlines()
    ours = [line for line in lines if line.endswith(f"/vhpc.partition/{GENERATION}/helpers")]
    assert len(ours) >= len(cgroup.hierarchies())
    group.kill()
    child.wait()


@pytest.mark.promise("attack.survive")
def test_the_end_reaches_processes_that_left_their_session(group: Cgroup) -> None:
    script = "for i in 1 2 3; do env -i setsid sh -c 'trap \"\" TERM; sleep 60 & sleep 60' & done; sleep 60"
    child = member(group, "sh", "-c", script)
    until = time.monotonic() + limit(30)
    while len(group.pids()) < 10 and time.monotonic() < until:
        time.sleep(0.02)
    pids = group.pids()
    assert len(pids) >= 10
    group.kill()
    assert group.pids() == set()
    assert all(process.start_time(pid) is None for pid in pids)
    child.wait()


@pytest.mark.promise("attack.helper-limits")
def test_a_fork_bomb_is_bounded_and_ended(group: Cgroup) -> None:
    counted = [folder / "helpers" for folder in group.folders if (folder / "helpers/pids.max").exists()]
    if not counted:
        pytest.skip("no pids controller is mounted here: mount one")
    child = member(group, "sh", "-c", "f() { f & f & wait; }; f 2>/dev/null")
    until = time.monotonic() + limit(60)
    while "max 0" in (counted[0] / "pids.events").read_text() and time.monotonic() < until:
        time.sleep(0.02)
    assert "max 0" not in (counted[0] / "pids.events").read_text(), "no fork was ever refused"
    assert int((counted[0] / "pids.current").read_text()) <= LIMITS.helper_tasks
    group.kill()
    assert group.pids() == set()
    child.wait()


@pytest.mark.promise("attack.helper-limits")
def test_helpers_that_want_too_much_memory_are_ended(group: Cgroup) -> None:
    hungry = "x = bytearray(256 << 20); print(len(x))"
    child = member(group, "python3", "-c", hungry)
    assert child.wait(timeout=60) == -9
    assert child.stdout is not None
    assert child.stdout.read() == b""


@pytest.mark.promise("attack.helper-limits")
def test_cpus_outside_of_the_group_cannot_be_had(group: Cgroup) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("this machine has one CPU: nothing is outside of the group")
    want = "import os; os.sched_setaffinity(0, {0, 1}); print(sorted(os.sched_getaffinity(0)))"
    child = member(group, "python3", "-c", want)
    out, _ = child.communicate(timeout=30)
    assert out == b"[0]\n"


def test_it_is_made_twice_and_removed_twice(group: Cgroup) -> None:
    group.create(LIMITS)
    assert GENERATION in cgroup.generations() or cgroup.has_systemd()
    group.remove()
    assert not any(folder.exists() for folder in group.folders)
    group.remove()
    group.kill()
    group.create(LIMITS)


def test_a_process_from_elsewhere_is_taken_in(group: Cgroup) -> None:
    child = subprocess.Popen(["sleep", "60"])
    try:
        group.add(child.pid)
        group.add(child.pid)
        assert group.pids() == {child.pid}
    finally:
        group.kill()
        child.wait()


@pytest.mark.promise("boot.end")
def test_a_process_that_has_ended_is_not_taken_in(group: Cgroup) -> None:
    """A guest may end at any moment: that is no error of the node."""
    child = subprocess.Popen(["true"])
    child.wait()
    group.add(child.pid)
    assert group.pids() == set()


HOLD = """
import mmap, os, socket, sys, time
fd = os.memfd_create("memory-backend-memfd")
os.ftruncate(fd, 48 << 20)
area = mmap.mmap(fd, 48 << 20)
for at in range(0, 48 << 20, 4096):
    area[at] = 1
held = socket.socket(fileno=int(sys.argv[1]))
socket.send_fds(held, [b"x"], [fd])
print("sent", flush=True)
time.sleep(60)
"""


@pytest.mark.promise("attack.memory-kept")
@pytest.mark.long
def test_held_memory_is_noticed_and_its_holder_named(group: Cgroup) -> None:
    """A "QEMU" in the group hands its guest's memory to a process outside, and ends."""
    ours, its = socket.socketpair()
    its.set_inheritable(True)
    qemu = subprocess.Popen(
        ["python3", "-c", f"import os; os.read(0, 1)\n{HOLD}", str(its.fileno())],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=(its.fileno(),),
    )  # fmt: skip
    assert qemu.stdin is not None
    assert qemu.stdout is not None
    group.add(qemu.pid)
    qemu.stdin.write(b"x")
    qemu.stdin.close()
    assert qemu.stdout.readline() == b"sent\n"
    inodes = memory.of_process(qemu.pid)
    assert len(inodes) == 1
    group.kill()
    qemu.wait()
    # in a message that no process has read: no process shows it; the kernel counts a little later
    until = time.monotonic() + limit(60)
    while group.guest_memory_bytes() < 40 << 20 and time.monotonic() < until:
        time.sleep(0.05)
    assert group.guest_memory_bytes() > 40 << 20
    assert memory.holders(inodes) == []
    with pytest.raises(Exception, match="MiB of a guest that has ended are still held"):
        memory.release(inodes, group, [])
    _, (fd,), _, _ = socket.recv_fds(ours, 1, 1)
    keeper = subprocess.Popen(["sleep", "60"], pass_fds=(fd,))
    os.close(fd)
    assert [holder.ref.pid for holder in memory.holders(inodes)] == [keeper.pid]
    with pytest.raises(Exception, match=rf"process {keeper.pid} \(sleep\) of uid 0"):
        memory.release(inodes, group, [2001])
    assert [holder.ref.pid for holder in memory.release(inodes, group, [0])] == [keeper.pid]
    keeper.wait()
    assert memory.release(inodes, group, []) == []
    ours.close()
    its.close()


def test_missing_control_groups_are_reported() -> None:
    with pytest.raises(NodeError, match="no control groups"):
        Cgroup(GENERATION, [], systemd=False).create(LIMITS)


def test_hierarchies_are_read_from_mountinfo() -> None:
    debian = "29 23 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
    assert cgroup.hierarchies(debian) == [Hierarchy(Path("/sys/fs/cgroup"), frozenset())]
    old = (
        "30 25 0:27 / /sys/fs/cgroup/systemd rw shared:10 - cgroup cgroup rw,xattr,name=systemd\n"
        "31 25 0:28 / /sys/fs/cgroup/cpu,cpuacct rw shared:11 - cgroup cgroup rw,cpu,cpuacct\n"
        "22 1 8:1 / / rw - ext4 /dev/sda1 rw,errors=remount-ro\n"
    )
    assert cgroup.hierarchies(old) == [
        Hierarchy(Path("/sys/fs/cgroup/cpu,cpuacct"), frozenset({"cpu", "cpuacct"}))
    ]


def test_limits_follow_from_the_plan() -> None:
    guest = GuestPlan(
        index=0, hostname="n1", pins=(VcpuPin(0, 4, 0), VcpuPin(1, 5, 0)),
        topology=GuestTopology(1, 1, 2, 1), cells=(GuestCell(0, (0, 1), 2048, 0),), memory_mib=2048,
        emulator_cpus=(0,), emulator_choice="",
    )  # fmt: skip
    plan = NodePlan(Generation(1, 0, "0123abcd"), "n1", (guest, guest), 5000, 904)
    limits = limits_of(plan, Guests(helper_memory_mib=100, qemu_memory_slack_mib=1000))
    assert limits.cpus == (0, 4, 5)
    assert limits.helper_memory_mib == 200
    assert limits.memory_mib == 2 * 2048 + 200 + 2000
