# SPDX-License-Identifier: Apache-2.0
"""Tools of users for running jobs: ports and files of guests, and the list of images."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator

import pytest
from cluster import EXEC, Job, Lab
from injection import let_go, runs, settled, until

pytestmark = pytest.mark.lab

PORT, HERE = 8899, 18899
SIZE_MIB = 50


@contextlib.contextmanager
def forwarding(lab: Lab, job: Job, *words: str) -> Iterator[str]:
    """vhpc forward on the login host; yields the file with what it says."""
    log = f"/home/alice/forward-{job.id}.log"
    start = f"setsid vhpc forward {job.id} {' '.join(words)} </dev/null >/dev/null 2>{log} & echo $!"
    pid = lab.run("login", "sh", "-c", start, user="alice").out.strip()
    try:
        until(lambda: "leads to" in lab.run("login", "cat", log).out, "the forwarded port", 60)
        yield log
    finally:
        lab.run("login", "kill", "-TERM", pid, check=False)
        until(
            lambda: lab.run("login", "kill", "-0", pid, check=False).code != 0, "the end of the command", 20
        )


def steps(lab: Lab, job: Job) -> str:
    return lab.run("ctl", "squeue", "--steps", "-h", "-j", str(job.id), "-o", "%i %j").out


def test_the_end_of_a_job_ends_a_forwarded_port(lab: Lab) -> None:
    it = lab.submit("echo up; sleep 600", "-w", "n1")
    runs(lab, it)
    command = [*EXEC, "-u", "alice", "login", "--", "vhpc", "forward", str(it.id), "0:80"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL) as process:
        assert process.stderr is not None
        assert b"leads to port 80 of the guest of n1" in process.stderr.readline()
        assert b"nothing listens on port 80" in process.stderr.readline()
        lab.run("login", "scancel", str(it.id), user="alice")
        assert process.stderr.read().decode() == f"vhpc: job {it.id} has ended\n"
        assert process.wait(60) == 0
    settled(lab)


def test_sbatch_lists_images_and_creates_no_job(lab: Lab) -> None:
    names = lab.run("login", "vhpc", "image", "names", user="alice").out
    assert "debian-minimal:latest\n" in names
    for command in (("sbatch", "--vhpc-image=list", "--wrap=:"), ("srun", "--vhpc-image=list", "true")):
        done = lab.run("login", *command, user="alice")
        assert (done.out, done.err) == (names, "")
    assert lab.run("ctl", "squeue", "-h").out == ""


# --- tests that share a job; those that need the nodes come before ------------------------------


@pytest.fixture(scope="module")
def job(lab: Lab) -> Iterator[Job]:
    """A job of two nodes whose first guest has a server, and /tmp/own in each guest."""
    script = f"""
    mkdir -p /tmp/www && cd /tmp/www && head -c {SIZE_MIB << 20} /dev/urandom > data && sha256sum < data > sum
    srun -N2 --ntasks-per-node=1 sh -c 'mkdir -p /tmp/own/sub; hostname > /tmp/own/sub/name
        chmod 750 /tmp/own/sub; ln -s sub/name /tmp/own/link; ln -s /etc/shadow /tmp/own/outside'
    python3 -m http.server -b 127.0.0.1 {PORT} >/dev/null 2>&1 &
    until python3 -c 'import socket; socket.create_connection(("127.0.0.1", {PORT}))' 2>/dev/null
    do sleep 0.5; done
    echo up; until [ -e ~/go-$SLURM_JOB_ID ]; do sleep 0.5; done
    """
    it = lab.submit(script, "-N2", "--mem=768")
    runs(lab, it)
    yield it
    let_go(lab, it)
    it.wait()
    settled(lab)


@pytest.mark.promise("tools.forward")
@pytest.mark.results
def test_a_server_in_a_guest_is_reached(lab: Lab, job: Job) -> None:
    expected = lab.run("login", "vhpc", "cp", f"{job.id}:/tmp/www/sum", "-", user="alice").out.split()[0]
    fetch = f"""
    for i in 1 2 3 4 5 6 7 8 9; do curl -sf http://127.0.0.1:{HERE}/sum >/tmp/sum-$i & done
    curl -sf http://127.0.0.1:{HERE}/data | sha256sum; wait; cat /tmp/sum-[1-9] | sort -u; rm /tmp/sum-[1-9]
    """.replace("curl -sf", "python3 -c 'import shutil, sys, urllib.request as r; "
                "shutil.copyfileobj(r.urlopen(sys.argv[1]), sys.stdout.buffer)'")  # fmt: skip
    with forwarding(lab, job, f"{HERE}:{PORT}") as log:
        assert "vhpc-forward" in steps(lab, job)
        done = lab.run("login", "sh", "-c", fetch, user="alice", timeout=300)
        assert [line.split()[0] for line in done.out.splitlines()] == [expected] * 2
        listening = lab.run("login", "ss", "-Hltn", f"sport = :{HERE}").out
        assert f"127.0.0.1:{HERE}" in listening
        again = lab.run("login", "vhpc", "forward", str(job.id), f"{HERE}:1", user="alice", check=False)
        assert (again.code, len(again.err.splitlines())) == (1, 1)
        assert f"cannot listen on port {HERE} of this host: Address already in use" in again.err
        assert len(lab.run("login", "cat", log).out.splitlines()) == 1
    until(lambda: "vhpc-forward" not in steps(lab, job), "the end of the step", 20)


@pytest.mark.results
def test_a_socket_admits_only_its_user(lab: Lab, job: Job) -> None:
    path = f"/tmp/forward-{job.id}.sock"
    ask = (
        "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); "
        "s.send(b'GET /sum\\r\\n\\r\\n'); print(len(s.recv(99)))"
    )
    with forwarding(lab, job, str(PORT), "--socket", path):
        assert int(lab.run("login", "python3", "-c", ask, path, user="alice").out) > 0
        assert "PermissionError" in lab.run("login", "python3", "-c", ask, path, user="bob", check=False).err
    assert lab.run("login", "ls", path, check=False).code != 0


@pytest.mark.promise("tools.cp")
@pytest.mark.results
def test_files_are_copied_both_ways(lab: Lab, job: Job) -> None:
    make = "rm -rf ~/cp && mkdir -p ~/cp/in/deep && cd ~/cp && head -c 20000000 /dev/urandom > in/deep/data"
    lab.run(
        "login",
        "sh",
        "-c",
        f"{make} && chmod 700 in/deep && echo x > in/run && chmod 755 in/run",
        user="alice",
    )
    script = f"""
    cd ~/cp && vhpc cp in {job.id}/n2:/tmp && vhpc cp {job.id}/n2:/tmp/in back && diff -r in back
    stat -c '%a' back/deep back/run
    vhpc cp {job.id}/n2:/tmp/own own; echo $?
    cat own/link; stat -c '%a' own/sub; ls own
    echo stream | vhpc cp - {job.id}:/tmp/stream && vhpc cp {job.id}:/tmp/stream -
    """
    done = lab.run("login", "sh", "-c", script, user="alice", timeout=300)
    assert done.out.split() == ["700", "755", "1", "n2", "750", "link", "sub", "stream"]
    assert "left out 1 link that leads outside: ./outside -> /etc/shadow\n" in done.err
    lab.run("login", "rm", "-rf", "/home/alice/cp")


@pytest.mark.results
@pytest.mark.parametrize(
    ("words", "user", "expected"),
    [
        (("forward", "{job}", "0:80"), "bob", "is not yours: it belongs to alice"),
        (("cp", "{job}:/tmp/own", "x"), "bob", "is not yours: it belongs to alice"),
        (("forward", "{job}", "0:80", "--node", "n9"), "alice", "is not on node n9"),
        (
            ("forward", "{job}", "0:80", "--guest", "1"),
            "alice",
            "there is no guest 1 on n1: the job has one guest",
        ),
        (("forward", "999999", "0:80"), "alice", "job 999999 is unknown"),
        (("cp", "{job}:/no/such/file", "x"), "alice", "/no/such/file: No such file or directory"),
    ],
)
def test_refused_commands_are_one_line(
    lab: Lab, job: Job, words: tuple[str, ...], user: str, expected: str
) -> None:
    argv = [word.format(job=job.id) for word in words]
    done = lab.run("login", "vhpc", *argv, user=user, check=False)
    assert done.code != 0
    assert (expected in done.err, len(done.err.splitlines())) == (True, 1), done.err
