# SPDX-License-Identifier: Apache-2.0
"""A user against the node and against other users, by the user's own file systems and tools."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster import Lab
from injection import WAITING, let_go, runs, said, settled, until

from silent_fuse import SERVER

pytestmark = [pytest.mark.lab, pytest.mark.slow]
NODE = "n1"


@pytest.fixture
def silent(lab: Lab) -> Iterator[str]:
    """A folder below alice's home whose FUSE server takes each request and answers no read."""
    lab.run(NODE, "mkdir", "-p", "/home/alice/silent", user="alice")
    lab.run(NODE, "sh", "-c", "cat > /tmp/silent.py; rm -f /tmp/silent.out", stdin=SERVER)
    serve = "setsid python3 /tmp/silent.py /home/alice/silent 2001 </dev/null >/tmp/silent.out 2>&1 &"
    lab.run(NODE, "sh", "-c", serve)
    until(lambda: "mounted" in lab.run(NODE, "cat", "/tmp/silent.out", check=False).out, "the mount")
    yield "/home/alice/silent"
    ends = "pkill -f '[p]ython3 /tmp/silent.py'; umount -l /home/alice/silent; rmdir /home/alice/silent"
    lab.run(NODE, "sh", "-c", ends, check=False)


def test_a_file_system_that_never_answers_drains_no_node(lab: Lab, silent: str) -> None:
    """A daemon of a shared folder waits for it, deaf to SIGKILL, when the job ends."""
    job = lab.submit(f"cat {silent}/file & {WAITING}", "-n1", "-w", NODE)
    runs(lab, job)
    until(lambda: "read" in lab.run(NODE, "cat", "/tmp/silent.out").out, "a read of the guest")
    lab.run("ctl", "scancel", str(job.id))
    assert job.wait() == "CANCELLED"
    settled(lab)


LEFT = """
setsid python3 - <<'END' >/dev/null 2>&1 &
import os, socket, time
held = socket.socket(socket.AF_UNIX)  # users cannot list the folder of jobs
held.connect(f"/run/vhpc/jobs/{os.environ['SLURM_JOB_ID']}/g0/run.sock")
open(os.path.expanduser("~/left"), "w").write(str(os.getpid()))
time.sleep(4321)
END
"""


def test_tools_and_leftovers_of_users_reach_nothing_of_others(lab: Lab) -> None:
    """Bob asks for ports, files and the console of alice's guest, alice for ports of the node.

    And a process of hers on the host side of the job leaves its session, with a connection to the channel.
    """
    lab.run("login", "rm", "-f", "left", user="alice")
    job = lab.submit(f"{LEFT}\n{WAITING}", "-n1", "-w", NODE, "--vhpc-batch=host")
    runs(lab, job)
    for words in (
        ("forward", str(job.id), "0:6818"),
        ("cp", f"{job.id}:/etc/hostname", "-"),
        ("console", str(job.id)),
        ("report", str(job.id)),
    ):
        done = lab.run("login", "timeout", "60", "vhpc", *words, user="bob", check=False)
        assert done.code not in (0, 124), (words, done)
        assert len(done.err.splitlines()) == 1, (words, done)
        assert done.out == "", (words, done)
    # 6818 is slurmd's port on the node: a guest has its own loopback interface
    forward = f"timeout 60 vhpc forward {job.id} 0:6818 2>~/forward.log & "
    ends = "until grep -q listens ~/forward.log; do sleep 0.2; done; cat ~/forward.log; kill $!"
    told = lab.run("login", "sh", "-c", forward + ends, user="alice").out
    assert "nothing listens on port 6818 of the guest of n1 yet" in told

    def left() -> list[str]:
        return lab.run("login", "cat", "left", user="alice", check=False).out.split()

    (pid,) = until(left, "the process that stays, with a connection to the channel of its user's guest")
    let_go(lab, job)
    assert job.wait() == "COMPLETED"
    assert "done" in said(lab, job)
    settled(lab)
    lab.run(NODE, "kill", pid, user="alice", check=False)
