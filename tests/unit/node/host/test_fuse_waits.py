# SPDX-License-Identifier: Apache-2.0
"""Processes that ignore SIGKILL because a file system of their user does not answer."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from silent_fuse import silent_fuse
from vhpc_slurm.errors import TeardownError
from vhpc_slurm.node.host import cgroup, process
from vhpc_slurm.node.host.cgroup import Cgroup
from vhpc_slurm.node.host.limits import Limits

pytestmark = [
    pytest.mark.skipif(
        os.geteuid() != 0, reason="run as root: the test mounts, and starts other users' processes"
    ),
    pytest.mark.xdist_group("cgroup"),
]
ALICE, BOB = 65531, 65532


@pytest.fixture
def top() -> Iterator[Path]:
    """A folder that other users may enter, which pytest's is not."""
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="vhpc-fuse-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def reader(path: Path, uid: int, before: str = "") -> subprocess.Popen[bytes]:
    """A process of a user that reads 64 KiB of a file."""
    read = f"dd if={path} of=/dev/null bs=64k count=1"
    drop = f"exec setpriv --reuid={uid} --regid={uid} --clear-groups {read}"
    return subprocess.Popen(["sh", "-c", f"{before}{drop}"], stderr=subprocess.DEVNULL)


def ref_of(child: subprocess.Popen[bytes]) -> process.ProcessRef:
    started = process.start_time(child.pid)
    assert started is not None
    return process.ProcessRef(child.pid, started)


@pytest.mark.promise("attack.fuse-wait")
def test_a_process_that_waits_for_its_users_fuse_can_be_ended(top: Path) -> None:
    with silent_fuse(top / "mine", ALICE) as server:
        child = reader(top / "mine/file", ALICE)
        assert server.stdout is not None
        assert server.stdout.readline() == "read\n"
        child.kill()
        time.sleep(0.3)
        assert child.poll() is None, "SIGKILL is not enough: the server has taken the request"
        process.end(ref_of(child))
        assert process.start_time(child.pid) is None


@pytest.mark.promise("attack.fuse-wait")
def test_fuse_mounts_of_other_users_and_root_are_not_aborted(top: Path) -> None:
    for name, owner in (("bobs", BOB), ("sites", 0)):
        with silent_fuse(top / name, owner) as server:
            child = reader(top / name / "file", ALICE)
            assert server.stdout is not None
            assert server.stdout.readline() == "read\n"
            with pytest.raises(TeardownError, match="is probably stuck in the kernel"):
                process.end(ref_of(child), kill_s=0.5)
            assert (top / name / "other").stat().st_uid == owner, "its connection is still there"
        child.wait(30)


@pytest.mark.promise("attack.fuse-wait")
def test_a_generation_that_waits_for_its_users_fuse_can_be_ended(top: Path) -> None:
    group = Cgroup(f"{os.getpid()}.0.0123abcd", cgroup.hierarchies(), systemd=False)
    limits = Limits(memory_mib=512, helper_memory_mib=64, tasks=64, helper_tasks=32, cpus=(0,))
    try:
        group.create(limits)
        procs = group.entry(limits).procs
    except OSError as err:
        pytest.skip(f"control groups cannot be made here ({err}): run with /sys/fs/cgroup writable")
    with silent_fuse(top / "mine", ALICE) as server:
        child = reader(top / "mine/file", ALICE, "".join(f"echo $$ > {path} && " for path in procs))
        assert server.stdout is not None
        assert server.stdout.readline() == "read\n"
        group.kill()
        assert group.pids() == set()
    child.wait(30)
    group.remove()
