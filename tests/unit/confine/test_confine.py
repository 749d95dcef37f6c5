# SPDX-License-Identifier: Apache-2.0
"""vhpc-confine on the real kernel: what a helper has, and what its own user can do to it."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pace import limit
from vhpc_slurm.errors import NodeError, UserError
from vhpc_slurm.node.host import confine, fuse, process
from vhpc_slurm.node.host.cgroup import CgroupEntry
from vhpc_slurm.node.host.confine import Confinement, ShareAbsentError, SharedDirectory

BUILT = Path(os.environ.get("VHPC_GUEST_BIN", "")).parent / "confine/vhpc-confine"
pytestmark = [
    pytest.mark.xdist_group("cgroup"),
    pytest.mark.skipif(os.getuid() != 0, reason="makes namespaces and changes uids: run as root"),
    pytest.mark.skipif(not BUILT.is_file(), reason="programs are not built: run by `make unit`"),
]
ALICE = process.Credentials(2001, 2001, (2001, 3001))
# of this worker alone: fixtures of other modules end all processes of theirs
GENERATION = f"{os.getpid()}.0.0123abcd"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of alice's, whose parents everybody may pass through."""
    for parent in tmp_path.parents:
        if str(parent).startswith("/tmp/"):
            parent.chmod(0o755)
    tmp_path.chmod(0o755)
    home = tmp_path / "alice"
    home.mkdir()
    os.chown(home, 2001, 2001)
    return home


def confinement(folder: Path | str | None = None, **more: object) -> Confinement:
    share = None if folder is None else SharedDirectory(str(folder), read_only=False)
    return Confinement(str(BUILT), ALICE, share=share, **more)  # type: ignore[arg-type]


def run(own: Confinement, *argv: str) -> str:
    """Run a command to its end; its output, exit status at the end."""
    reader, writer = os.pipe()
    helper = confine.start(argv, own, generation=GENERATION, stderr=writer)
    os.close(writer)
    helper.finish(10)
    with os.fdopen(reader, "rb") as pipe:
        said = pipe.read().decode()
    _, status = os.waitpid(helper.ref.pid, 0)
    return said + str(os.waitstatus_to_exitcode(status))


@pytest.fixture
def sleeper(folder: Path) -> Iterator[process.ProcessRef]:
    """A helper of alice's that does nothing."""
    with Path("/dev/null").open("w") as null:
        helper = confine.start(
            ["/usr/bin/sleep", "60"], confinement(folder), generation=GENERATION, stderr=null.fileno()
        )
    ref = helper.finish(10)
    until = time.monotonic() + limit(30)
    while Path(f"/proc/{ref.pid}/comm").read_text() != "sleep\n" and time.monotonic() < until:
        time.sleep(0.01)
    yield ref
    process.end(ref)


def as_alice(code: str, *arguments: object) -> str:
    """Output of Python code that alice runs, outside of any namespace."""
    done = subprocess.run(
        [*process.drop_to(ALICE), sys.executable, "-c", code, *map(str, arguments)],
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout


# --- what it has ---------------------------------------------------------------


def test_a_helper_is_its_user_without_any_capability(folder: Path) -> None:
    status = run(confinement(folder), "/usr/bin/cat", "/proc/self/status")
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert fields["Uid"].split() == ["2001"] * 4
    assert fields["Gid"].split() == ["2001"] * 4
    assert fields["Groups"].split() == ["2001", "3001"]
    assert {fields[c] for c in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
    assert fields["NoNewPrivs"] == "1"


@pytest.mark.promise("attack.workdir-link")
def test_its_root_has_the_system_the_shared_folder_and_itself(folder: Path) -> None:
    (folder / "file").touch()
    listed = run(confinement(folder), "/usr/bin/ls", "/", "/share").split()
    assert set(listed) - {"bin", "sbin", "lib", "lib32", "lib64", "0"} == {
        "/:", "etc", "proc", "share", "usr", "/share:", "file",
    }  # fmt: skip
    script = (
        "ls /etc; ls /proc | grep -c '^[0-9]'; touch /usr/x || touch /x || touch /etc/x; mknod /share/n b 8 0"
    )
    said = run(confinement(folder), "/usr/bin/sh", "-c", script).splitlines()
    assert said[0] == "ld.so.cache"
    assert int(said[1]) <= 3, "it and its children"
    assert sum("Read-only file system" in line for line in said) == 3, said
    assert "Operation not permitted" in said[-2]


def test_files_that_a_helper_makes_belong_to_its_user(folder: Path) -> None:
    assert run(confinement(folder), "/usr/bin/touch", "/share/made") == "0"
    assert (folder / "made").stat().st_uid == 2001


def test_a_folder_may_be_shared_for_reading_alone(folder: Path) -> None:
    own = Confinement(str(BUILT), ALICE, share=SharedDirectory(str(folder), read_only=True))
    assert "Read-only file system" in run(own, "/usr/bin/touch", "/share/made")


def test_limits_and_cpus_are_as_given(folder: Path) -> None:
    cpu = min(os.sched_getaffinity(0))
    own = confinement(folder, cpus=(cpu,), limits=(("nofile", 77), ("fsize", 4096)))
    script = "ulimit -n; ulimit -c; nproc; cat /proc/self/coredump_filter; head -c 9999 /dev/zero >/share/big"
    said = run(own, "/usr/bin/sh", "-c", script).split()
    assert said[:4] == ["77", "0", "1", "00000000"]
    assert (folder / "big").stat().st_size <= 4096


def test_a_submount_is_shared_and_the_proc_of_a_chroot_is_not(folder: Path) -> None:
    script = f"""
set -e
mkdir {folder}/data {folder}/chroot
mount -t tmpfs -o mode=1777 none {folder}/data
touch {folder}/data/there
mount -t proc none {folder}/chroot
exec {BUILT} --uid=2001 --gid=2001 --share={folder} -- \\
    /usr/bin/sh -c 'ls /share/data; ls /share/chroot | wc -l'
"""
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["there", "0"]


# --- what may be shared ----------------------------------------------------------


@pytest.mark.promise("attack.workdir-link")
@pytest.mark.parametrize("where", ["/", "/proc", "/proc/1", "/sys", "/dev", "/run"])
def test_a_link_to_a_forbidden_folder_is_not_shared(folder: Path, where: str) -> None:
    (folder / "link").symlink_to(where)
    with pytest.raises(UserError, match="cannot be shared") as caught:
        run(confinement(folder / "link"), "/usr/bin/true")
    assert str(folder / "link") in caught.value.what


def test_a_folder_with_run_folders_of_jobs_in_it_is_not_shared(folder: Path) -> None:
    (folder / "vhpc/jobs").mkdir(parents=True)
    own = confinement(folder, refuse=(str(folder / "vhpc"),))
    with pytest.raises(UserError, match="cannot be shared"):
        run(own, "/usr/bin/true")
    with pytest.raises(UserError, match="cannot be shared"):
        run(confinement(folder / "vhpc/jobs", refuse=(str(folder / "vhpc"),)), "/usr/bin/true")


def test_a_folder_that_the_user_cannot_enter_is_absent(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "roots").mkdir(mode=0o700)
    for path in (tmp_path / "roots", tmp_path / "none", folder / ("x" * 300)):
        with pytest.raises(ShareAbsentError):
            run(confinement(path), "/usr/bin/true")


# --- what goes wrong -------------------------------------------------------------


def test_a_command_that_is_not_there_is_the_nodes_fault(folder: Path) -> None:
    with pytest.raises(NodeError, match="No such file"):
        run(confinement(folder), "/usr/libexec/no-such-daemon")


def test_a_helper_that_is_killed_at_its_start_is_the_users_doing(folder: Path, tmp_path: Path) -> None:
    program = tmp_path / "vhpc-confine"
    program.write_text("#!/bin/sh\nkill -KILL $$\n")
    program.chmod(0o755)
    own = Confinement(str(program), ALICE, share=SharedDirectory(str(folder), read_only=False))
    with pytest.raises(UserError, match="SIGKILL"):
        run(own, "/usr/bin/true")


def test_a_stopped_helper_is_the_users_doing(sleeper: process.ProcessRef) -> None:
    assert confine.disturbed("it", [sleeper]) is None
    assert as_alice("import os, sys; os.kill(int(sys.argv[1]), 19); print('sent')", sleeper.pid) == "sent\n"
    until = time.monotonic() + limit(30)
    while not process.is_stopped(sleeper) and time.monotonic() < until:
        time.sleep(0.01)
    assert "stopped by a signal" in str(confine.disturbed("it", [sleeper]))
    os.kill(sleeper.pid, signal.SIGKILL)
    assert process.wait_gone(sleeper, 30)
    assert "SIGKILL" in str(confine.disturbed("it", [sleeper]))


@pytest.mark.skipif(not Path("/dev/fuse").exists(), reason="no /dev/fuse: modprobe fuse")
def test_a_hanging_file_system_of_the_user_fails_the_job(folder: Path) -> None:
    """Nobody serves it: whatever asks it for anything waits until it is gone."""
    libc = ctypes.CDLL(None, use_errno=True)
    served = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={served},rootmode=40000,user_id=2001,group_id=2001,allow_other".encode()
    target = str(folder).encode()
    assert libc.mount(b"nobody", target, b"fuse.hung", 6, options) == 0, os.strerror(ctypes.get_errno())
    try:
        helper = confine.start(["/usr/bin/true"], confinement(folder), generation=GENERATION, stderr=2)
        with pytest.raises(UserError, match=r"does not answer: .* FUSE file system of yours"):
            helper.finish(1.0)
    finally:
        os.close(served)  # who waits for it is told that it has gone
        libc.umount2(target, 2)
    assert process.wait_gone(helper.ref, 5)


@pytest.mark.promise("attack.fuse-home")
def test_fuse_mounts_of_users_are_distinguished_from_the_sites() -> None:
    mounts = (
        "30 1 0:30 / /home rw shared:1 - fuse.sshfs server:/ rw,user_id=0,group_id=0,allow_other\n"
        "31 1 0:31 / /home/alice/far rw shared:2 - fuse.sshfs x:/ rw,user_id=2001,group_id=2001\n"
        "32 1 0:32 / /home/bob/far rw - fuse x rw,user_id=20013,group_id=2002\n"
    )
    assert [one.place for one in fuse.mounts(2001, mounts)] == ["/home/alice/far"]
    assert fuse.mounts(2002, mounts) == []


@pytest.mark.parametrize(
    "words",
    [
        "--uid=0 --gid=1 -- /bin/true",
        "--uid=1 --gid=0 -- /bin/true",
        "--uid=1 -- /bin/true",
        "--uid=4294967295 --gid=1 -- /bin/true",
        "--uid=1x --gid=1 -- /bin/true",
        "--uid=1 --gid=1 --groups=1,,2 -- /bin/true",
        "--uid=1 --gid=1 --cpus=3-1 -- /bin/true",
        "--uid=1 --gid=1 --cpus=0, -- /bin/true",
        "--uid=1 --gid=1 --limit=stack=1 -- /bin/true",
        "--uid=1 --gid=1 --limit=nofile -- /bin/true",
        "--uid=1 --gid=1 --share=home -- /bin/true",
        "--uid=1 --gid=1 --read-only -- /bin/true",
        "--uid=1 --gid=1 --refuse=/x -- /bin/true",
        "--uid=1 --gid=1 -- true",
        "--uid=1 --gid=1",
        "--nonsense",
        "",
    ],
)
def test_bad_usage_is_refused_before_anything_is_done(words: str) -> None:
    done = subprocess.run([BUILT, *words.split()], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr
    assert done.stdout == ""


def test_it_tells_its_version_and_usage() -> None:
    for option, said in (("--version", "vhpc-confine "), ("--help", "usage: vhpc-confine ")):
        done = subprocess.run([BUILT, option], capture_output=True, text=True, check=True)
        assert done.stdout.startswith(said)


# --- what its user can do to it -----------------------------------------------------

REACH = """
import ctypes, os, sys
pid = int(sys.argv[1])
libc = ctypes.CDLL(None, use_errno=True)
def reach(what, act):
    try:
        act()
    except OSError:
        return
    print(what)
def call(*numbers):
    if libc.syscall(*map(ctypes.c_long, numbers)) < 0:
        raise OSError(ctypes.get_errno(), "")
for name in ("mem", "environ", "maps", "fd/0", "cwd/.", "root/.", "exe"):
    reach(name, lambda: os.open(f"/proc/{pid}/{name}", os.O_RDONLY))
PTRACE_SEIZE, PIDFD_GETFD, PROCESS_VM_READV = 0x4206, 438, 310
reach("ptrace", lambda: call(101, PTRACE_SEIZE, pid, 0, 0))
pidfd = os.pidfd_open(pid)
reach("pidfd_getfd", lambda: call(PIDFD_GETFD, pidfd, 0, 0))
buffer = ctypes.create_string_buffer(8)
class IoVec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
local, remote = IoVec(ctypes.addressof(buffer), 8), IoVec(0x400000, 8)
# EFAULT says that it was allowed to look
def read_memory():
    if libc.process_vm_readv(pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0) < 0:
        if ctypes.get_errno() != 14:
            raise OSError(ctypes.get_errno(), "")
reach("process_vm_readv", read_memory)
reach("setns", lambda: os.open(f"/proc/{pid}/ns/user", os.O_RDONLY))
print("tried")
"""


@pytest.mark.promise("attack.trace")
def test_its_user_cannot_look_into_it_or_take_its_descriptors(sleeper: process.ProcessRef) -> None:
    assert as_alice(REACH, sleeper.pid) == "tried\n"


def test_the_attack_works_on_a_process_that_is_not_confined() -> None:
    """Else the test above would show nothing."""
    child = subprocess.Popen([*process.drop_to(ALICE), "/usr/bin/sleep", "60"])
    try:
        until = time.monotonic() + limit(30)
        while Path(f"/proc/{child.pid}/comm").read_text() != "sleep\n" and time.monotonic() < until:
            time.sleep(0.01)
        reached = as_alice(REACH, child.pid).split()
    finally:
        child.kill()
        child.wait()
    assert {"mem", "environ", "maps", "fd/0", "ptrace", "pidfd_getfd"} <= set(reached)


def test_it_keeps_the_descriptors_it_is_given_and_no_others(folder: Path) -> None:
    ours, its = socket.socketpair()
    os.set_inheritable(ours.fileno(), True)
    reader, writer = os.pipe()
    helper = confine.start(
        ["/usr/bin/ls", "/proc/self/fd"], confinement(folder), generation=GENERATION, stderr=writer,
        pass_fds=(its.fileno(),),
    )  # fmt: skip
    os.close(writer)
    helper.finish(10)
    with os.fdopen(reader) as pipe:
        numbers = {int(word) for word in pipe.read().split()}
    os.waitpid(helper.ref.pid, 0)
    ours.close()
    assert numbers - {0, 1, 2, its.fileno()} == {min(set(range(3, 99)) - {its.fileno()})}, (
        "ls opens the folder"
    )
    its.close()


def test_it_joins_the_given_control_groups(folder: Path, tmp_path: Path) -> None:
    """Here a plain file stands for cgroup.procs; tests of control groups have real ones."""
    procs = tmp_path / "cgroup.procs"
    procs.touch()
    own = confinement(folder, entry=CgroupEntry(procs=(procs,)))
    assert run(own, "/usr/bin/true") == "0"
    assert procs.read_text() == "0"
