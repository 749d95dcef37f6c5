# SPDX-License-Identifier: Apache-2.0
"""Attacks of a neighbour, a guest's root and a forger: they get nothing."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

import pytest
from cluster import IMAGE, Job, Lab
from injection import let_go, one_line, ours, runs, said, settled, until

pytestmark = pytest.mark.lab

WAITING = "echo up; until [ -e ~/go-$SLURM_JOB_ID ]; do sleep 0.2; done; echo done"

# Tried as another user on the node; prints one line for each thing that worked.
NEIGHBOUR = """
import glob, os, signal, socket, subprocess
job = JOB
run, state = f"/run/vhpc/jobs/{job}", "/var/lib/vhpc"

def reach(what, act):
    try:
        act()
    except OSError:
        return
    print("reached", what)

def connect(path):
    socket.socket(socket.AF_UNIX).connect(path)

for name in SOCKETS:
    reach(name, lambda: connect(name))
for name in FILES:
    reach(name, lambda: open(name, "rb").close())
    reach(name + " for writing", lambda: os.close(os.open(name, os.O_WRONLY)))
for name in (run, run + "/g0", run + "/g0/channel", "/run/vhpc", "/run/vhpc/jobs"):
    reach("to make a folder in " + name, lambda: (os.mkdir(name + "/x"), os.rmdir(name + "/x")))
private = ["/run/vhpc/uids", "/run/vhpc/locks", "/run/vhpc/tombstones", run + "/g0/channel"]
private += [state + "/journal", state + "/outbox", state + "/timeline"]
for name in private:
    reach("to list " + name, lambda: os.listdir(name))
for path in glob.glob("/proc/[0-9]*"):
    try:
        words = open(path + "/cmdline", "rb").read().split(b"\\0")
        name, uid = os.path.basename(words[0]).decode(), os.stat(path).st_uid
    except OSError:
        continue
    if not (name.startswith("qemu-system") or name in ("virtiofsd", "vhpc-locks", "vhpc-shim", "vhpc-run")):
        continue
    pid = int(path[6:])
    if uid == os.getuid() != 0:
        continue  # his own job's
    print("saw", name)
    reach(f"to kill {name}", lambda: os.kill(pid, signal.SIGKILL))
    for part in ("mem", "environ", "root", "fd/0"):
        reach(f"{part} of {name}", lambda: os.open(f"{path}/{part}", os.O_RDONLY))
virsh = subprocess.run(["virsh", "-c", "qemu:///system", "destroy", DOMAIN], capture_output=True)
if virsh.returncode == 0:
    print("reached libvirt")
print("tried as", os.getuid())
"""


@pytest.fixture(scope="module")
def victims(lab: Lab) -> Iterator[list[Job]]:
    """Jobs of alice on n1 for others to attack: the last one runs."""
    jobs: list[Job] = []
    yield jobs
    for job in jobs:
        lab.run("ctl", "scancel", str(job.id))
    lab.quiet()


@pytest.fixture
def victim(lab: Lab, victims: list[Job]) -> Job:
    """The job to attack, the same for all tests."""
    if not victims:
        victims.append(lab.submit(WAITING, "-n1", "-w", "n1"))
        runs(lab, victims[-1])
    return victims[-1]


@pytest.fixture(autouse=True)
def _nothing_left() -> None:
    """Here one job outlives single tests: the last one looks at what is left."""


def attack(lab: Lab, job: Job) -> str:
    run = f"/run/vhpc/jobs/{job.id}"
    found = lab.run("n1", "find", run, "(", "-type", "f", "-o", "-type", "s", ")", "-printf", "%y %p\\n").out
    kinds = [line.split(" ", 1) for line in found.splitlines()]
    sockets = [path for kind, path in kinds if kind == "s"]
    files = [path for kind, path in kinds if kind == "f" and path != f"{run}/state"]
    assert len(sockets) >= 5, found  # run.sock, agent.sock, locks.sock, two shares
    assert any(path.endswith("console.log") for path in files), found
    files += lab.run(
        "n1", "find", "/var/lib/vhpc/journal", "/run/vhpc/uids", "/run/vhpc/locks", "-type", "f"
    ).out.split()
    domain = lab.run("n1", "virsh", "-q", "list", "--name").out.split()[0]
    return (
        NEIGHBOUR.replace("JOB", str(job.id), 1)
        .replace("SOCKETS", repr(sockets))
        .replace("FILES", repr(files))
        .replace("DOMAIN", repr(domain))
    )


def nothing_reached(out: str) -> None:
    assert out.endswith("tried as 2002\n"), out
    assert {"saw virtiofsd", "saw vhpc-locks", "saw vhpc-shim"} <= set(out.splitlines()), out
    assert "reached" not in out, out


@pytest.mark.promise("attack.neighbour")
def test_a_neighbour_on_the_node_reaches_nothing_of_a_job(lab: Lab, victim: Job) -> None:
    script = attack(lab, victim)
    nothing_reached(lab.run("n1", "python3", "-", user="bob", stdin=script).out)
    # it is not the attack that fails: root, who spares what would harm the job, reaches all
    for what, instead in (
        ("signal.SIGKILL", "0"),
        ("connect(name)", "os.stat(name)"),
        ("destroy", "dominfo"),
    ):
        script = script.replace(what, instead)
    root = lab.run("n1", "python3", "-", stdin=script).out
    assert root.count("reached") > 30, root


@pytest.mark.promise("attack.neighbour")
def test_a_neighbours_job_on_the_same_node_reaches_nothing(lab: Lab, victim: Job) -> None:
    """From the host side of his job; the guest's side sees no host at all."""
    lab.run("login", "sh", "-c", "cat > attack.py", user="bob", stdin=attack(lab, victim))
    job = lab.finish("python3 attack.py", "-n1", "-w", "n1", "--vhpc-batch=host", user="bob")
    nothing_reached(job.output())
    inside = lab.finish("ls -A /run/vhpc 2>&1; ls /home/alice 2>&1; ls /home", "-n1", "-w", "n1", user="bob")
    assert "run.sock" not in inside.output()
    assert inside.output().endswith("bob\n")
    assert said(lab, victim) == "up\n"


@pytest.mark.promise("attack.image-file")
def test_images_are_root_s_alone_to_write(lab: Lab, victim: Job) -> None:
    script = (
        "for f in $(find /var/lib/vhpc/images -type f; find /shared/vhpc/catalog -type f); do"
        " (: >> $f) 2>/dev/null && echo wrote $f; done;"
        " (: > /var/lib/vhpc/images/x) 2>/dev/null && echo made; id -u"
    )
    assert lab.run("n1", "sh", "-c", script, user="bob").out == "2002\n"
    # QEMU may not, either: its uid opens the root image for reading only
    shown = lab.run("n1", "sh", "-c", "find /var/lib/vhpc/images -type f ! -uid 0 -o -type f -perm /022").out
    assert shown == ""


@pytest.mark.promise("attack.qemu")
def test_the_processes_of_a_guest_have_no_rights(lab: Lab, victim: Job) -> None:
    script = (
        "for p in $(pgrep -f '^[^ ]*(qemu-system|virtiofsd|vhpc-locks|vhpc-shim|vhpc-run)'); do"
        " echo $(tr '\\0' ' ' < /proc/$p/cmdline | cut -d' ' -f1 | xargs basename)"
        " $(grep -E '^(Uid|CapInh|CapPrm|CapEff|CapBnd|CapAmb|NoNewPrivs|Seccomp):' /proc/$p/status |"
        " awk '{print $1 $2}'); done"
    )
    rows = [line.split() for line in lab.run("n1", "sh", "-c", script).out.splitlines()]
    seen: dict[str, list[dict[str, str]]] = {}
    for name, *pairs in rows:
        seen.setdefault(name, []).append(dict(pair.split(":") for pair in pairs))
    none = "0" * 16
    for name, all_fields in seen.items():
        for fields in all_fields:
            assert fields["CapEff"] == fields["CapPrm"] == fields["CapAmb"] == none, (name, fields)
            if name != "vhpc-run":  # as Slurm starts any task
                assert fields["NoNewPrivs"] == "1", (name, fields)
            if name in ("virtiofsd", "vhpc-locks", "vhpc-shim"):
                assert fields["CapBnd"] == none, (name, fields)
    (qemu,) = seen["qemu-system-x86_64"]
    assert qemu["Seccomp"] == "2"
    assert 700000 <= int(qemu["Uid"]) < 701024
    assert {fields["Uid"] for fields in (*seen["virtiofsd"], *seen["vhpc-locks"])} == {"2001"}
    assert {fields["Uid"] for fields in seen["vhpc-shim"]} == {qemu["Uid"]}


@pytest.mark.promise("attack.files", "attack.setuid")
def test_root_in_the_guest_is_the_user_on_the_host(lab: Lab) -> None:
    secret = "only-the-hosts-root-may-read-this"
    setup = (
        f"umask 077; echo {secret} > /home/alice/roots; echo {secret} > /scratch/roots;"
        " echo x > /scratch/bobs; chown bob /scratch/bobs; chmod 644 /scratch/bobs;"
        " ln -sfn /etc/shadow /home/alice/link;"
        f" echo {secret} > /etc/vhpc-test-secret; ln -sfn /etc/vhpc-test-secret /home/alice/link2"
    )
    lab.run("n1", "sh", "-c", setup)
    attacks = {
        "read": "cat /home/alice/roots /scratch/roots",
        "link": "grep -c . /home/alice/link; cat /home/alice/link2",
        "dotdot": "cat /home/alice/../../etc/vhpc-test-secret /scratch/../etc/vhpc-test-secret",
        "write": "sh -c 'echo y >> /scratch/bobs'",
        "chown": "sh -c 'touch ~alice/mine; chown 0:0 ~alice/mine; chown 2002 ~alice/mine'",
        "setuid": "sh -c 'cp /bin/true ~alice/suid; chown 0 ~alice/suid; chmod 6755 ~alice/suid'",
        "node": "sh -c 'mknod ~alice/node b 8 0; mknod ~alice/char c 1 1; mknod /scratch/node b 8 0'",
        "caps": "setcap cap_setuid+ep ~alice/suid",
        "xattr": "sh -c 'command -v setfattr && setfattr -n trusted.x -v 1 ~alice/suid'",
        "other": "ls /home/bob",
        "remount": "sh -c 'mount -o remount,rw,suid,dev /home/alice; cat /home/alice/roots'",
    }
    script = "".join(f"echo == {name}; sudo {what} 2>&1\n" for name, what in attacks.items())
    job = lab.finish(f"sudo id -u\n{script}", "-n1", "-w", "n1")
    out = job.output()
    assert out.startswith("0\n"), out
    assert secret not in out, out
    left = "find /home/alice /scratch -type b -o -type c -o -type f ! -user alice -perm /6000"
    assert lab.run("n1", *shlex.split(left)).out == "", out
    owners = lab.run("n1", "stat", "-c", "%n %u:%g", "/home/alice/mine", "/home/alice/suid").out
    assert owners == "/home/alice/mine 2001:2001\n/home/alice/suid 2001:2001\n", out
    assert lab.run("n1", "cat", "/scratch/bobs").out == "x\n"
    assert lab.run("n1", "getfattr", "-d", "-m", "-", "/home/alice/suid", check=False).out == ""
    clear = "cd /home/alice && rm -f roots link link2 mine suid /scratch/roots /scratch/bobs"
    lab.run("n1", "sh", "-c", f"{clear} /etc/vhpc-test-secret")


EVIL = "a'b\"c <x y='z'>&amp;]]> $(touch evil) `touch evil`;touch evil"


@pytest.mark.promise("attack.texts")
def test_texts_of_the_user_stay_texts(lab: Lab) -> None:
    """Working directory, job name, comment and console path with every kind of meta character."""
    folder = f"/scratch/{EVIL.replace('/', '_')}"
    lab.run("login", "mkdir", "-p", folder, user="alice")
    job = lab.finish(
        "pwd; hostname",
        f"--chdir={folder}",
        f"--job-name={EVIL}",
        f"--comment={EVIL}",
        f"--vhpc-console={EVIL} %j",
        "-o",
        "/home/alice/evil-%j",
        "-w",
        "n1",
    )
    assert job.output("evil-{id}") == f"{folder}\nn1\n"
    job.leave_queue(120)
    names = lab.run("login", "ls", folder, user="alice").out
    assert names == f"{EVIL} {job.id}\n"
    found = lab.run("n1", "find", "/", "-ignore_readdir_race", "-xdev", "-name", "evil").out
    assert found == ""
    lab.run("login", "rm", "-rf", folder, user="alice")


@pytest.mark.promise("attack.console-path")
def test_a_console_path_is_written_with_the_users_rights(lab: Lab) -> None:
    for path in ("/etc/vhpc-console", "/home/bob/console", "../bob/console"):
        job = lab.finish("echo ran", f"--vhpc-console={path}", "-w", "n1")
        one_line(job, "^vhpc: --vhpc-console: .*console cannot be written on n1: ")
        assert [line for line in job.output().splitlines() if line not in ours(job.output())] == ["ran"]
        job.leave_queue(120)
    found = lab.run("n1", "ls", "/etc/vhpc-console", "/home/bob/console", check=False)
    assert found.out == ""


FORGED = f"{IMAGE}</name><evil/>"


@pytest.mark.promise("attack.variables")
def test_forged_variables_give_no_guest_and_no_other_user(lab: Lab) -> None:
    """Variables that sbatch's caller sets are not the values that the plugin checked."""
    variables = {
        "SPANK_VHPC_IMAGE": FORGED,
        "SLURM_SPANK_VHPC_IMAGE": FORGED,
        "_SLURM_SPANK_OPTION_vhpc_vhpc_image": FORGED,
        "SLURM_SPANK__SLURM_SPANK_OPTION_vhpc_vhpc_image": FORGED,
        "VHPC_JOB_GENERATION": "1.0.00000000",
        "VHPC_RUN_SOCKET": "/home/alice/fake.sock",
        "VHPC_RUN_COMMANDS": "sh",
        "VHPC_RUN_COMMAND_PATH": "/home/alice/bin",
        "SPANK_VHPC_CONSOLE": "/etc/x\n<evil/>",
    }
    words = ["env", *(f"{name}={value}" for name, value in variables.items())]
    for image in ([], [f"--vhpc-image={IMAGE}"]):
        done = lab.run(
            "login", *words, "sbatch", "--parsable", "--export=ALL", *image, "-n1", "-w", "n1", user="alice",
            stdin="#!/bin/sh\nid -un; hostname; uname -r; echo $VHPC_RUN_SOCKET\n",
        )  # fmt: skip
        job = Job(lab, int(done.out), "alice")
        job.wait()
        name, host, kernel, *socket = job.output().splitlines()
        assert (name, host) == ("alice", "n1")
        assert (kernel != lab.run("n1", "uname", "-r").out.strip()) == bool(image)
        if image:
            assert socket != ["/home/alice/fake.sock"]
    settled_but_for_others(lab)


def settled_but_for_others(lab: Lab) -> None:
    until(lambda: not any("DRAIN" in lab.node_state(node)[0] for node in ("n1", "n2")), "nodes in service")


@pytest.mark.promise("attack.job-name")
def test_a_forged_job_name_does_not_change_the_user(lab: Lab) -> None:
    """A name that holds a whole record of scontrol's, of another user, and the head of another job."""
    job = lab.submit("echo ran; id -u", "--hold", "-w", "n1")
    name = (
        "x UserId=bob(2002) GroupId=bob(2002) MCS_label=N/A JobState=RUNNING Reason=None Restarts=0"
        " Partition=all BatchFlag=1 NodeList=n1 NumCPUs=1 Nodes=n1 CPU_IDs=0-1 Mem=512 GRES="
        f" MinCPUsNode=1\nJobId={job.id + 1000} JobName=y"
    )
    lab.run("ctl", "scontrol", "update", f"JobId={job.id}", f"JobName={name}")
    lab.run("ctl", "scontrol", "release", str(job.id))
    assert job.wait() == "CANCELLED"
    comment = lab.run("ctl", "scontrol", "show", "job", str(job.id)).out
    assert "AdminComment=vhpc: cannot parse scontrol's output" in comment, comment
    settled_but_for_others(lab)


@pytest.mark.promise("attack.job-name")
def test_the_user_of_a_lease_is_the_one_slurm_names(lab: Lab) -> None:
    job = lab.submit("echo ran", "--hold", image=None)
    hook = ["env", "-i", f"SLURM_JOB_ID={job.id}", "SLURM_JOB_UID=2002", f"SPANK_VHPC_IMAGE={IMAGE}"]
    lab.run("ctl", *hook, "/usr/libexec/vhpc/prolog-slurmctld", user="slurm")
    assert job.wait() == "CANCELLED"
    assert "Slurm passed uid 2002" in lab.run("ctl", "scontrol", "show", "job", str(job.id)).out


@pytest.mark.promise("attack.variables")
def test_the_node_checks_values_that_submission_does_not(lab: Lab) -> None:
    """PrologSlurmctld with values that our own sbatch would never let through cancels the job."""
    for name, value in {
        "IMAGE": FORGED,
        "IMAGE ": "../../etc/passwd",
        "MEM_RESERVE": "-1",
        "BATCH": "moon",
        "TIMEOUT": "9" * 12,
    }.items():
        job = lab.submit("echo ran", "--hold", image=None)
        environment = [
            f"SLURM_JOB_ID={job.id}",
            f"SPANK_VHPC_IMAGE={IMAGE}",
            f"SPANK_VHPC_{name.strip()}={value}",
        ]
        done = lab.run(
            "ctl", "env", "-i", *environment, "/usr/libexec/vhpc/prolog-slurmctld", user="slurm", check=False
        )
        assert done.code in (0, 1), done
        assert job.wait() == "CANCELLED", (name, done)
        comment = lab.run("ctl", "scontrol", "show", "job", str(job.id)).out
        assert "AdminComment=vhpc: --vhpc-" in comment


@pytest.mark.promise("console.size", "attack.console")
def test_a_guest_that_floods_its_console_does_not_fill_the_node(lab: Lab) -> None:
    """Six times what is kept at either end: the lab keeps 64 KiB."""
    flood = "yes 'the flood that fills the disk' | head -c 393216 > /dev/ttyS0; echo the end > /dev/ttyS0"
    job = lab.submit(f"sudo sh -c {shlex.quote(flood)}; {WAITING}", "-n1", "-w", "n1")
    runs(lab, job)
    size, blocks = lab.run("n1", "stat", "-c", "%s %b", f"/run/vhpc/jobs/{job.id}/g0/console.log").out.split()
    assert int(size) > 393216
    assert int(blocks) * 512 <= 4 * 65536
    # the guest's kernel may say more after it
    until(lambda: "the end\n" in lab.vhpc("n1", "console", str(job.id))["console"], "the flood's end")
    text = lab.vhpc("n1", "console", str(job.id))["console"]
    (skipped,) = re.findall(r"^\[(\d+) bytes left out\]$", text, re.M)
    assert int(skipped) > 393216 - 4 * 65536
    assert text.count("the flood that fills the disk\n") > 2 * 65536 // 33, text[:300]
    let_go(lab, job)
    assert job.wait() == "COMPLETED"


def test_nothing_is_left_of_all_this(lab: Lab, victim: Job, victims: list[Job]) -> None:
    let_go(lab, victim)
    try:
        assert victim.wait() == "COMPLETED"
    except BaseException:
        victims.clear()  # tried again with another one
        raise
    assert said(lab, victim) == "up\ndone\n"
    settled(lab)
    for node in ("n1", "n2"):
        assert lab.vhpc(node, "reconcile", "--check") == []
