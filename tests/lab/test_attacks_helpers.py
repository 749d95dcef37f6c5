# SPDX-License-Identifier: Apache-2.0
"""A user against the node, with the helper processes that run for his own guest.

He may run programs on the host, as whom virtiofsd runs: by a task prolog, by a
job without a guest, on a login shell of the node.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
from cluster import Job, Lab
from injection import WAITING, boots, configured, let_go, one_line, runs, said, settled, until

pytestmark = pytest.mark.lab

NODE = "n1"
CGROUPS = "/sys/fs/cgroup/*/vhpc.partition"
# Attacks on a process with the attacker's own ids; prints those that succeeded.
REACH = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def reach(what, act):
    try:
        act()
    except OSError:
        return
    print("reached", what)
def call(*numbers):
    if libc.syscall(*map(ctypes.c_long, numbers)) < 0:
        raise OSError(ctypes.get_errno(), "")
PTRACE_SEIZE, PIDFD_GETFD = 0x4206, 438
for pid in map(int, sys.argv[1:]):
    for name in ("mem", "environ", "maps", "cwd/.", "root/.", "exe", "fd/1", "fd/2"):
        reach(name, lambda: os.open(f"/proc/{pid}/{name}", os.O_RDONLY))
    pidfd = os.pidfd_open(pid)
    for fd in range(20):
        reach(f"descriptor {fd}", lambda: call(PIDFD_GETFD, pidfd, fd, 0))
    reach("ptrace", lambda: call(101, PTRACE_SEIZE, pid, 0, 0))
    print("tried", pid)
"""
# A FUSE file system of uid 2001 without a server, mounted on argv[1] as long as this runs.
HUNG = """
import ctypes, os, sys, time
fd = os.open("/dev/fuse", os.O_RDWR)
options = f"fd={fd},rootmode=40000,user_id=2001,group_id=2001,allow_other"
libc = ctypes.CDLL(None, use_errno=True)
if libc.mount(b"nobody", sys.argv[1].encode(), b"fuse.hung", 6, options.encode()) < 0:
    sys.exit(os.strerror(ctypes.get_errno()))
print("mounted", flush=True)
time.sleep(800)
"""
# Hands a guest's memory to a process of uid 2001, as a hole in the confinement would; prints its pid.
HAND_OUT = """
import os, subprocess
def program(pid):
    try:
        return open(f"/proc/{pid}/cmdline", "rb").read().split(b"\\0")[0]
    except OSError:  # it has ended
        return b""
qemu = next(pid for pid in os.listdir("/proc") if pid.isdigit() and b"qemu-system" in program(pid))
fds = f"/proc/{qemu}/fd"
memory = next(n for n in os.listdir(fds) if os.readlink(f"{fds}/{n}").startswith("/memfd:"))
held = os.open(f"{fds}/{memory}", os.O_RDWR)
os.set_inheritable(held, True)
alice = ["setpriv", "--reuid=2001", "--regid=2001", "--clear-groups"]
null = subprocess.DEVNULL
child = subprocess.Popen([*alice, "sleep", "8888"], pass_fds=[held], start_new_session=True,
                         stdin=null, stdout=null, stderr=null)
print(child.pid)
"""


@pytest.fixture
def job(lab: Lab) -> Iterator[Job]:
    """A job of alice's that runs on the node."""
    running = lab.submit(WAITING, "-n1", "-w", NODE)
    runs(lab, running)
    yield running
    lab.run("ctl", "scancel", str(running.id))


def daemons(lab: Lab) -> list[str]:
    found = lab.run(NODE, "pgrep", "-u", "alice", "-x", "virtiofsd|vhpc-locks").out.split()
    assert len(found) >= 3
    return found


def log_since(lab: Lab, mark: int) -> str:
    """The log of the node's hooks after so many lines."""
    return "\n".join(lab.run(NODE, "cat", "/var/log/vhpc/hooks.log").out.splitlines()[mark:])


def log_length(lab: Lab) -> int:
    return len(lab.run(NODE, "sh", "-c", "cat /var/log/vhpc/hooks.log 2>/dev/null || :").out.splitlines())


# --- looking into helpers, and outliving the job in them ----------------------------


@pytest.mark.promise("attack.trace")
def test_a_user_cannot_trace_the_own_daemons(lab: Lab, job: Job) -> None:
    pids = daemons(lab)
    out = lab.run(NODE, "python3", "-", *pids, user="alice", stdin=REACH).out
    assert out.split("\n")[:-1] == [f"tried {pid}" for pid in pids]
    # the attack itself works: it reaches all of an unconfined process of hers
    script = 'sleep 60 & python3 -c "$0" $!; kill $!'
    assert lab.run(NODE, "sh", "-c", script, REACH, user="alice").out.count("reached") > 8
    let_go(lab, job)
    assert job.wait() == "COMPLETED"


def test_helpers_keep_their_cpus_and_root_directory(lab: Lab, job: Job) -> None:
    generation = lab.run(NODE, "sh", "-c", "ls /var/lib/vhpc/journal").out.strip().removesuffix(".jsonl")
    for pid in daemons(lab):
        groups = lab.run(NODE, "cat", f"/proc/{pid}/cgroup").out
        assert groups.count(f"/vhpc.partition/{generation}/helpers") >= 5, groups
        allowed = lab.run(NODE, "grep", "Cpus_allowed_list", f"/proc/{pid}/status").out.split()[1]
        lab.run(NODE, "taskset", "-acp", "0-1023", pid, user="alice", check=False)
        assert lab.run(NODE, "grep", "Cpus_allowed_list", f"/proc/{pid}/status").out.split()[1] == allowed
        if lab.run(NODE, "cat", f"/proc/{pid}/comm").out == "vhpc-locks\n":
            continue  # it opens files in all shares
        root = lab.run(NODE, "ls", f"/proc/{pid}/root/").out.split()
        assert not {"home", "run", "dev", "sys", "var", "tmp"} & set(root), root


@pytest.mark.promise("attack.survive")
def test_escaped_processes_end_with_the_job(lab: Lab, job: Job) -> None:
    """A daemon that was taken over may start what it likes; it stays in the control group."""
    script = f"""
for procs in {CGROUPS}/*/helpers/cgroup.procs; do echo $$ > $procs; done
exec setpriv --reuid=2001 --regid=2001 --clear-groups env -i setsid -f sleep 7777 </dev/null >/dev/null 2>&1
"""
    lab.run(NODE, "sh", "-c", script)
    find = ("pgrep", "-f", "sleep 7777")
    assert lab.run(NODE, *find).out.strip()
    let_go(lab, job)
    assert job.wait() == "COMPLETED"
    settled(lab)
    assert lab.run(NODE, *find, check=False).out == ""


@pytest.mark.promise("attack.memory-kept")
def test_held_guest_memory_is_noticed_and_its_holder_ended(lab: Lab, job: Job) -> None:
    """As a hole in the confinement would let him: root hands it to him here."""
    mark = log_length(lab)
    holder = lab.run(NODE, "python3", "-", stdin=HAND_OUT).out.strip()
    let_go(lab, job)
    assert job.wait() == "COMPLETED"
    settled(lab)
    assert lab.run(NODE, "pgrep", "-f", "sleep 8888", check=False).out == ""
    assert re.search(rf"ended process {holder} \(sleep\) of uid 2001: it held memory", log_since(lab, mark))


# --- draining nodes -------------------------------------------------------------------

DISTURB = """
end=$(($(date +%s) + 400))
until [ -e ~/enough ] || [ $(date +%s) -gt $end ]; do
    pkill -{signal} -u alice -x 'virtiofsd|vhpc-(locks|confine)' && [ {signal} = STOP ] && sleep 0.05
done
"""


@pytest.mark.promise("attack.daemon-signal")
@pytest.mark.parametrize(("signal", "word"), [("KILL", "SIGKILL"), ("STOP", "stopped by a signal")])
def test_a_daemon_signalled_in_the_boot_fails_only_the_job(lab: Lab, signal: str, word: str) -> None:
    lab.run("login", "rm", "-f", "enough", user="alice")
    lab.run(NODE, "sh", "-c", f"({DISTURB.format(signal=signal)}) >/dev/null 2>&1 &", user="alice")
    try:
        job = lab.finish("echo never", "-n1", "-w", NODE)
    finally:
        lab.run("login", "touch", "enough", user="alice")
    assert job.accounted() == ["FAILED", "1:0"]
    one_line(job, rf"^vhpc: .*daemon of (the )?shared folder.*|(virtiofsd|vhpc-locks).* {word}")
    assert word in job.output()
    settled(lab)


@pytest.mark.promise("attack.daemon-signal")
def test_a_daemon_stopped_in_its_job_costs_that_job_alone(lab: Lab, job: Job) -> None:
    lab.run(NODE, "pkill", "-STOP", "-u", "alice", "-x", "virtiofsd")
    lab.run("ctl", "scancel", str(job.id))
    assert job.wait() == "CANCELLED"
    settled(lab)


@pytest.mark.promise("attack.fuse-home")
def test_a_hung_home_of_the_user_fails_only_that_users_job(lab: Lab) -> None:
    lab.run(NODE, "sh", "-c", "cat > /tmp/hung.py; rm -f /tmp/o-* /tmp/hung.out", stdin=HUNG)
    serve = "setsid python3 /tmp/hung.py /home/alice </dev/null >/tmp/hung.out 2>&1 &"
    with configured(lab, NODE, "guests", "stage_timeout_s = 10"):
        try:
            lab.run(NODE, "sh", "-c", serve)
            until(lambda: "mounted" in lab.run(NODE, "cat", "/tmp/hung.out", check=False).out, "the mount")
            job = lab.submit("echo never", "-n1", "-w", NODE, "--chdir=/tmp", "-o", "/tmp/o-%j")
            job.wait()
        finally:
            ends = "pkill -f '[p]ython3 /tmp/hung.py'; umount -l /home/alice"
            lab.run(NODE, "sh", "-c", ends, check=False)
    assert job.accounted() == ["FAILED", "1:0"]
    out = lab.run(NODE, "cat", f"/tmp/o-{job.id}").out
    assert re.search(r"^vhpc: /home/alice does not answer: .*FUSE file system of yours", out), out
    settled(lab)


@pytest.mark.promise("attack.workdir-link")
def test_the_target_of_a_working_directory_decides_the_share(lab: Lab) -> None:
    """Shared by its name, a link to / would be the node's root with its /proc."""
    output = ("-o", "/home/alice/slurm-%j.out")
    for leads in ("/", "/proc", "/run"):
        lab.run(NODE, "ln", "-sfn", leads, "/var/tmp/innocent", user="alice")
        script = "pwd; grep -c virtiofs /proc/mounts; cat /etc/hostname; ls /var/tmp/innocent/vhpc"
        job = lab.finish(script, "-n1", "-w", NODE, "--chdir=/var/tmp/innocent", *output)
        said = job.output().splitlines()
        assert said[:2] == [leads, "2"], said  # home and the site's: no third one
        assert "No such file" in said[-1]
    # a link to where the user may be is as good as the folder
    for command in ("mkdir -p /var/tmp/work", "ln -sfn /var/tmp/work /var/tmp/link"):
        lab.run(NODE, *command.split(), user="alice")
    job = lab.finish("echo here > f; pwd -P", "-n1", "-w", NODE, "--chdir=/var/tmp/link", *output)
    assert job.output() == "/var/tmp/work\n"
    assert lab.run(NODE, "cat", "/var/tmp/work/f", user="alice").out == "here\n"


# --- uids over time --------------------------------------------------------------------


def uid_of(lab: Lab, job: Job) -> int:
    names = lab.run(NODE, "grep", "-l", f"^{job.id}\\.", "-r", "/run/vhpc/uids").out.split()
    return int(names[0].rsplit("/", 1)[1])


@pytest.mark.promise("attack.uids")
def test_the_next_guest_gets_another_uid_that_owns_no_file(lab: Lab) -> None:
    first = lab.submit(WAITING, "-n1", "-w", NODE)
    runs(lab, first)
    used = uid_of(lab, first)
    guests = lab.vhpc(NODE, "config")["guests"]
    base, count = guests["uid_base"], guests["uid_count"]
    owner, free = (base + (used - base + ahead) % count for ahead in (1, 2))
    # as a QEMU that was taken over might leave it
    lab.run(NODE, "sh", "-c", f"cp /bin/sh /tmp/sh; chown {owner}:kvm /tmp/sh; chmod 6755 /tmp/sh")
    let_go(lab, first)
    first.wait()
    second = lab.submit(WAITING, "-n1", "-w", NODE, user="bob")
    runs(lab, second)
    try:
        assert uid_of(lab, second) == free
        # a guest's memory is not for the group that all QEMUs have, either
        qemu = lab.run(NODE, "pgrep", "-f", "^[^ ]*qemu-system").out.strip()
        read = f"head -c1 /proc/{qemu}/$f >/dev/null 2>&1 && echo read $f"
        script = f"for f in mem maps environ fd/0; do {read}; done; id -u"
        other = ("setpriv", f"--reuid={used}", "--regid=kvm", "--clear-groups", "--")
        assert lab.run(NODE, *other, "sh", "-c", script).out == f"{used}\n"
    finally:
        lab.run(NODE, "rm", "-f", "/tmp/sh")
        let_go(lab, second)
        second.wait()


# --- what helpers write ----------------------------------------------------------------


@pytest.mark.promise("attack.daemon-log")
def test_channel_clients_cannot_fill_the_shims_log_or_memory(lab: Lab, job: Job) -> None:
    attack = f"""
import socket, time
held = []
for turn in range(3000):
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(1)
    try:
        sock.connect("/run/vhpc/jobs/{job.id}/g0/run.sock")
        sock.send(b"\\xff" * 64)
    except OSError:
        time.sleep(0.002)
    held.append(sock)
    if len(held) > 200:
        held.pop(0).close()
print("done")
"""
    assert lab.run(NODE, "python3", "-", user="alice", stdin=attack, timeout=600).out == "done\n"
    log = f"/run/vhpc/jobs/{job.id}/g0/helpers.log"
    assert int(lab.run(NODE, "stat", "-c", "%s", log).out) < 16 * 1024
    shim = lab.run(NODE, "pgrep", "-x", "vhpc-shim").out.strip()
    resident = lab.run(NODE, "grep", "VmRSS", f"/proc/{shim}/status").out.split()
    assert int(resident[1]) < 64 * 1024, resident
    assert json.loads(lab.run(NODE, "vhpc", "ps", "--json").out)
    let_go(lab, job)
    assert job.wait() == "COMPLETED"


FLOOD = """
import glob, os, socket, time
end, held = time.time() + 400, []
while time.time() < end and not os.path.exists(os.path.expanduser("~/enough")):
    for path in glob.glob("/run/vhpc/jobs/*/g0/run.sock"):
        for _ in range(400):
            sock = socket.socket(socket.AF_UNIX)
            sock.setblocking(False)
            try:
                sock.connect(path)
            except OSError:
                sock.close()
                break
            held.append(sock)
    time.sleep(0.01)
    if len(held) > 800:
        for sock in held[:400]:
            sock.close()
        del held[:400]
"""


def test_a_full_channel_queue_keeps_root_out_of_nothing(lab: Lab) -> None:
    mark = log_length(lab)
    lab.run("login", "rm", "-f", "enough", user="alice")
    lab.run(NODE, "sh", "-c", "cat > /tmp/flood.py; chmod 644 /tmp/flood.py", stdin=FLOOD)
    background = "setsid python3 /tmp/flood.py </dev/null >/dev/null 2>&1 &"
    with configured(lab, NODE, "guests", "poweroff_timeout_s = 60"):  # on a busy machine 5 s may be too short
        lab.run(NODE, "sh", "-c", background, user="alice")
        try:
            job = lab.submit("sleep 1000", "-n1", "-w", NODE)
            # the script's own way into the guest is hers to block; hooks have theirs
            until(lambda: "ready in" in log_since(lab, mark), f"the guest of job {job.id}")
            lab.run("ctl", "scancel", str(job.id))
            job.wait()
        finally:
            lab.run("login", "touch", "enough", user="alice")
        settled(lab)
    assert "did not end" not in log_since(lab, mark), "it was asked to power off, and did"


def test_a_boot_without_disturbed_helpers_succeeds(lab: Lab) -> None:
    job = lab.submit(WAITING, "-n1", "-w", NODE)
    boots(lab, job, NODE)
    let_go(lab, job)
    assert job.wait() == "COMPLETED"
    assert said(lab, job) == f"up on {NODE}\ndone\n"
