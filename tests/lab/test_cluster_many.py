# SPDX-License-Identifier: Apache-2.0
"""A cluster of jobs that join at once, two on each node: 32 on the lab of `scripts/many-nodes`."""

from __future__ import annotations

import pytest
from cluster import Lab
from cluster_jobs import SMALL, cancelled
from injection import settled

from pace import limit

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.many_nodes, pytest.mark.timeout(2400)]

MOST = 32
# Each member waits for all others, calls each by name and IPv6, and ends when all have done so.
PROGRAM = """
import json, os, pathlib, socket, sys, threading, time
own, jobs, seen = os.environ["SLURM_JOB_ID"], int(sys.argv[1]), pathlib.Path(sys.argv[2])
files = pathlib.Path("/run/vhpc/cluster")
def serve():
    while True:
        server.accept()[0].sendall(own.encode())
def members():
    return [json.loads(line) for line in (files / "members").read_text().splitlines()]
def until(condition):
    while not condition():
        time.sleep(0.2)
server = socket.create_server(("", 7000), family=socket.AF_INET6, dualstack_ipv6=True, backlog=256)
threading.Thread(target=serve, daemon=True).start()
until(lambda: len(members()) == jobs)
known = members()
def call(where):
    while True:
        try:
            return int(socket.create_connection((where, 7000), 60).recv(20))
        except ConnectionRefusedError:
            time.sleep(0.2)  # its guest is a member, and its script has not begun
reached = {(row["job"], call(where)) for row in known for where in (row["host"], row["ipv6"])}
names = sorted(row["host"] for row in known)
lists = [sorted(line.replace(":", " ").split()[0] for line in (files / name).read_text().splitlines())
         for name in ("hostfile", "machinefile", "hosts")]
print("reached", len(reached), all(a == b for a, b in reached), lists == [names] * 3, flush=True)
print(json.dumps(names), flush=True)
(seen / own).touch()
until(lambda: len(list(seen.iterdir())) == jobs)
"""


@pytest.mark.promise("cluster.grow")
def test_jobs_that_join_at_once_reach_each_other(lab: Lab) -> None:
    jobs = min(MOST, 2 * len(lab.nodes))
    lab.run("login", "sh", "-c", "cat > all.py; rm -rf seen; mkdir seen", user="alice", stdin=PROGRAM)
    options = (
        f"--array=1-{jobs}",
        "-o",
        "many-%a.out",
        "--vhpc-cluster=many",
        f"--vhpc-timeout={limit(180):.0f}",
    )
    with cancelled(lab):
        job = lab.submit(f"exec python3 ~/all.py {jobs} ~/seen", *SMALL, *options)
        job.leave_queue(timeout=1500)
        outputs = [lab.read("alice", f"many-{element}.out").splitlines() for element in range(1, jobs + 1)]
        assert {lines[0] for lines in outputs} == {f"reached {jobs} True True"}
        assert len({lines[1] for lines in outputs}) == 1, "all know the same guests"
        settled(lab)
        assert lab.vhpc("ctl", "cluster", "ls", "--all") == []
    for node in lab.nodes:
        assert "vhpcb" not in lab.run(node, "ip", "-o", "link").out
