# SPDX-License-Identifier: Apache-2.0
"""vhpc ssh and vhpc ssh-config with real guests: sessions, files, terminals, and what is left of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster import Job, Lab, publish
from injection import let_go, runs, settled, until

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(3900)]

SSH_IMAGE = "debian-hpc"
WAIT = "echo up; until [ -e ~/go-$SLURM_JOB_ID ]; do sleep 0.5; done"
ENDED_S = 30
TERMINAL = """
import os, pty, select, sys, time
pid, fd = pty.fork()
if pid == 0:
    os.execvp("vhpc", ["vhpc", "ssh", sys.argv[1], "-tt"])
text = b""
def until(what):
    global text
    end = time.time() + 60
    while what not in text:
        assert time.time() < end, text
        if select.select([fd], [], [], 1)[0]:
            text += os.read(fd, 4096)
    text = text.partition(what)[2]
until(b"$ "); os.write(fd, b"tty; sleep 600; echo interrupted-$?\\n")
until(b"/dev/pts/"); time.sleep(1); os.write(fd, b"\\x03")
until(b"^C"); os.write(fd, b"echo $((6*7))-lives\\n")
until(b"42-lives"); os.write(fd, b"exit 5\\n")
try:
    while os.read(fd, 4096):
        pass
except OSError:
    pass
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.fixture(scope="module")
def job(lab: Lab) -> Iterator[Job]:
    """A job of two nodes whose image has sshd; alice has no keys yet."""
    publish(SSH_IMAGE)
    lab.run("login", "rm", "-rf", "/home/alice/.config/vhpc", "/home/alice/.ssh", user="alice")
    it = lab.submit(WAIT, "-N2", "--mem=768", image=SSH_IMAGE)
    runs(lab, it)
    yield it
    let_go(lab, it)
    it.wait()
    settled(lab)
    lab.run("login", "rm", "-rf", "/home/alice/.config/vhpc", "/home/alice/.ssh", user="alice")


def script(lab: Lab, job: Job, text: str, timeout: float = 300) -> list[str]:
    """Run a script on the login host as alice; lines of its output."""
    done = lab.run("login", "sh", "-c", text, "sh", str(job.id), user="alice", timeout=timeout)
    print(done.err)  # shown if the test fails
    return done.out.splitlines()


def guest(lab: Lab, job: Job, text: str) -> str:
    """Run a script in the first guest, by a step without ssh."""
    words = ("srun", "--jobid", str(job.id), "--overlap", "-N1", "-n1", "--nodelist=n1", "sh", "-c", text)
    return lab.run("login", *words, user="alice").out


def steps(lab: Lab, job: Job) -> str:
    return lab.run("ctl", "squeue", "--steps", "-h", "-j", str(job.id), "-o", "%j").out


def assert_no_session(lab: Lab, job: Job) -> None:
    """Waits for the end of the step, and finds no process and no keys of it."""
    until(lambda: "vhpc-ssh" not in steps(lab, job), "the end of the step", ENDED_S)
    left = "ls /dev/shm; ps -eo args | grep '[s]shd-session\\|[f]orward-to\\|[s]leep 6'"
    assert guest(lab, job, f"{left}; true") == ""


@pytest.mark.promise("tools.ssh")
@pytest.mark.results
def test_commands_have_their_status_and_the_jobs_variables(lab: Lab, job: Job) -> None:
    found = script(
        lab,
        job,
        "vhpc ssh $1 exit 7 </dev/null; echo $?\n"
        "vhpc ssh $1 --node n2 'hostname; id -un; pwd; umask' </dev/null\n"
        "vhpc ssh $1 'srun hostname </dev/null' </dev/null | sort\n"
        "vhpc ssh $1 'echo $SLURM_JOB_ID' </dev/null\n"
        "stat -c '%a' ~/.config/vhpc/ssh ~/.config/vhpc/ssh/host_key ~/.config/vhpc/ssh/id_ed25519\n",
    )
    assert found == ["7", "n2", "alice", "/home/alice", "0022", "n1", "n2", str(job.id), "700", "600", "600"]
    assert_no_session(lab, job)


@pytest.mark.promise("tools.ssh")
@pytest.mark.results
def test_files_pass_unchanged_by_ssh_scp_and_sftp(lab: Lab, job: Job) -> None:
    found = script(
        lab,
        job,
        "mkdir -p ~/ssh-files ~/.ssh && cd ~/ssh-files && head -c 8000000 /dev/urandom > data\n"
        "vhpc ssh $1 'cat > /tmp/data' < data\n"
        "vhpc ssh $1 cat /tmp/data </dev/null | cmp - data && echo ssh\n"
        "vhpc ssh-config $1 > config\n"
        "scp -qF config data vhpc-$1:/tmp/by-scp && scp -qF config vhpc-$1:/tmp/by-scp . && cmp data by-scp"
        " && echo scp\n"
        "echo 'put data /tmp/by-sftp\nget /tmp/by-sftp' | sftp -qF config -b - vhpc-$1 >/dev/null"
        " && cmp data by-sftp && echo sftp\n"
        "rm -r ~/ssh-files",
    )
    assert found == ["ssh", "scp", "sftp"]


@pytest.mark.promise("tools.ssh")
@pytest.mark.results
def test_another_computer_enters_with_its_own_key(lab: Lab, job: Job) -> None:
    """The lines of --login, without the ssh that brings their command to the login host."""
    found = script(
        lab,
        job,
        "mkdir -p -m 700 ~/.ssh; cd ~/.ssh; rm -f mine* other*\n"
        "for name in mine other; do ssh-keygen -q -t ed25519 -N '' -f $name; done\n"
        "cp mine.pub authorized_keys\n"
        "vhpc ssh-config $1 --login login.example | sed 's/ssh -o [^ ]* login.example //' > config-$1\n"
        "ssh -nF config-$1 -o IdentitiesOnly=yes -i mine vhpc-$1 hostname\n"
        "ssh -nF config-$1 -o IdentitiesOnly=yes -i other vhpc-$1 hostname 2>&1; echo $?\n"
        "sed -i 's/ssh-ed25519 .*/'\"$(cut -d' ' -f1,2 other.pub | sed 's:/:.:g')\"'/' config-$1\n"
        "ssh -nF config-$1 -o IdentitiesOnly=yes -i mine vhpc-$1 hostname 2>&1 | tail -1\n",
    )
    assert found == [
        "n1",
        f"alice@vhpc-{job.id}: Permission denied (publickey).",
        "255",
        "Host key verification failed.",
    ]


@pytest.mark.promise("tools.ssh")
@pytest.mark.results
def test_a_terminal_passes_keys_and_its_status(lab: Lab, job: Job) -> None:
    done = lab.run("login", "python3", "-c", TERMINAL, str(job.id), user="alice", check=False, timeout=300)
    assert (done.code, done.err) == (5, "")
    assert_no_session(lab, job)


@pytest.mark.promise("tools.ssh")
@pytest.mark.results
@pytest.mark.parametrize("number", ["HUP", "KILL"])
def test_programs_and_keys_end_with_the_connection(lab: Lab, job: Job, number: str) -> None:
    start = f"vhpc ssh {job.id} 'nohup sleep 600 & sleep 601' </dev/null >/dev/null 2>&1 & echo $!"
    pid = lab.run("login", "sh", "-c", start, user="alice").out.strip()
    until(lambda: "sleep 601" in guest(lab, job, "ps -eo args | grep '^sleep'; true"), "the session", 60)
    lab.run("login", "kill", f"-{number}", pid)
    assert_no_session(lab, job)


@pytest.mark.promise("attack.ssh-session")
@pytest.mark.results
def test_another_user_is_refused_in_one_line(lab: Lab, job: Job) -> None:
    expected = f"vhpc: job {job.id} is not yours: it belongs to alice (see: squeue --me)\n"
    for words in (("ssh", str(job.id), "id"), ("ssh-config", str(job.id))):
        done = lab.run("login", "vhpc", *words, user="bob", check=False)
        assert (done.code, done.out, done.err) == (1, "", expected)
    step = ("srun", "--jobid", str(job.id), "--overlap", "id")
    done = lab.run("login", *step, user="bob", check=False)
    assert (done.code, done.out) == (1, "")
    assert "Access/permission denied" in done.err
    assert lab.run("login", "ls", "/home/bob/.config", check=False).code != 0


@pytest.mark.promise("tools.ssh")
def test_the_end_of_the_job_ends_the_session(lab: Lab, job: Job) -> None:
    found = script(
        lab,
        job,
        "rm -f ~/in-session; vhpc ssh $1 'touch ~/in-session; sleep 600' </dev/null 2>&1 & pid=$!\n"
        "until [ -e ~/in-session ]; do sleep 0.2; done; touch ~/go-$1; wait $pid; echo $?; rm ~/in-session",
    )
    assert found == [f"Connection to vhpc-{job.id} closed by remote host.", "255"]
    assert job.wait() == "COMPLETED"
    settled(lab)
    assert lab.run("login", "pgrep", "-u", "alice", "-f", "vhpc_slurm.cli|vhpc-ssh", check=False).out == ""


@pytest.mark.promise("tools.ssh")
def test_an_image_without_sshd_is_named(lab: Lab) -> None:
    it = lab.submit(WAIT)
    runs(lab, it)
    done = lab.run("login", "vhpc", "ssh", str(it.id), "id", user="alice", check=False)
    let_go(lab, it)
    it.wait()
    assert (done.code, done.out) == (255, "")
    assert done.err.startswith(
        f"vhpc: the guest of {it.show()['NodeList']} has no sshd: the image of job {it.id} lacks it"
    )
    settled(lab)
