# SPDX-License-Identifier: Apache-2.0
"""Jobs of clusters in the lab: members that wait, and what their guests know and reach."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

from cluster import IMAGE, Done, Job, Lab
from injection import prints, said

SMALL = ("-n1", "--mem=500")
# A member waits until its user lets it end, and answers connections on port 7000.
WAIT = """
vhpc-members --follow > events-$SLURM_JOB_ID &
cat > member-$SLURM_JOB_ID.py <<'END'
import os, socket, threading, time
def serve():
    while True:
        server.accept()[0].sendall(os.environ["SLURM_JOB_ID"].encode())
server = socket.create_server(("", 7000), family=socket.AF_INET6, dualstack_ipv6=True)
threading.Thread(target=serve, daemon=True).start()
print("members", len(open("/run/vhpc/cluster/members").readlines()), flush=True)
while not os.path.exists(os.path.expanduser(f"~/go-{os.environ['SLURM_JOB_ID']}")):
    time.sleep(0.2)
END
python3 member-$SLURM_JOB_ID.py; echo status $?
"""
CALL = """
import socket, sys
for host in sys.argv[1:]:
    try:
        print(socket.create_connection((host, 7000), 5).recv(20).decode())
    except OSError as err:
        print("no", type(err).__name__)
"""


def booted(
    lab: Lab,
    node: str,
    *options: str,
    name: str = "alpha",
    user: str = "alice",
    image: str = IMAGE,
    first: str = "",
) -> Job:
    """A job of a cluster that has been submitted; its script begins with ``first``."""
    words = (*SMALL, "-w", node, f"--vhpc-cluster={name}", *options)
    return lab.submit(first + WAIT, *words, user=user, image=image)


def awaited(lab: Lab, *jobs: Job) -> None:
    """Wait until the scripts of members have begun."""
    for job in jobs:
        prints(job, "members", 240)
        assert job.queued(), said(lab, job)


def member(lab: Lab, node: str, *options: str, name: str = "alpha", user: str = "alice") -> Job:
    """A job of a cluster whose script has begun."""
    job = booted(lab, node, *options, name=name, user=user)
    awaited(lab, job)
    return job


def attempt(lab: Lab, job: Job, *command: str) -> Done:
    """A command in the first guest of a job, or of the first component of one."""
    group = ("--het-group=0",) if "HetJobId" in job.show() else ()
    step = ("srun", f"--jobid={job.id}", "--overlap", *group, "-N1", "-n1", *command)
    return lab.run("login", *step, user=job.user, check=False)


def inside(lab: Lab, job: Job, *command: str) -> str:
    """The output of a command in the first guest of a job, or of the first component of one."""
    done = attempt(lab, job, *command)
    assert done.code == 0, done
    return done.out


def members(lab: Lab, job: Job) -> dict[int, dict[str, object]]:
    """The members that a guest of a job knows, by JobId."""
    rows = [json.loads(line) for line in inside(lab, job, "cat", "/run/vhpc/cluster/members").splitlines()]
    return {row["job"]: row for row in rows}


def calls(lab: Lab, job: Job, *hosts: str) -> str:
    """The answers of other guests, called from a guest of the job: a line for each."""
    return inside(lab, job, "python3", "-c", CALL, *hosts).strip()


def end(lab: Lab, *jobs: Job) -> None:
    """Let jobs end by themselves."""
    for job in jobs:
        lab.run("login", "touch", f"/home/{job.user}/go-{job.id}", user=job.user)
    for job in jobs:
        assert job.wait(timeout=180) == "COMPLETED", said(lab, job)


@contextmanager
def cancelled(lab: Lab) -> Iterator[None]:
    """All jobs are cancelled at the end, also of a test that fails."""
    try:
        yield
    finally:
        lab.cancel_all()
