# SPDX-License-Identifier: Apache-2.0
"""Named clusters: the jobs of a user form one private network, which grows and shrinks with them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from cluster import Job, Lab
from injection import boots, kill_qemu, said, settled, unplugged, until

from pace import limit

pytestmark = [pytest.mark.lab, pytest.mark.timeout(600)]

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
try:
    print(socket.create_connection((sys.argv[1], 7000), 5).recv(20).decode())
except OSError as err:
    print("no", type(err).__name__)
"""


def member(lab: Lab, node: str, *options: str, name: str = "alpha", user: str = "alice") -> Job:
    """A job of a cluster whose script has begun."""
    job = lab.submit(WAIT, *SMALL, "-w", node, f"--vhpc-cluster={name}", *options, user=user)
    until(lambda: "members" in said(lab, job) or not job.queued(), f"job {job.id} to be a member", 240)
    assert job.queued(), job.told()
    return job


def inside(lab: Lab, job: Job, *command: str) -> str:
    """The output of a command in the first guest of a job."""
    step = ("srun", f"--jobid={job.id}", "--overlap", "-N1", "-n1", *command)
    return lab.run("login", *step, user=job.user).out


def members(lab: Lab, job: Job) -> dict[int, dict[str, object]]:
    """The members that a guest of a job knows, by JobId."""
    rows = [json.loads(line) for line in inside(lab, job, "cat", "/run/vhpc/cluster/members").splitlines()]
    return {row["job"]: row for row in rows}


def calls(lab: Lab, job: Job, host: str) -> str:
    """The answer of another guest, called from a guest of the job."""
    return inside(lab, job, "python3", "-c", CALL, host).strip()


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


@pytest.mark.promise("cluster.grow")
def test_jobs_join_reach_each_other_and_leave(lab: Lab) -> None:
    with cancelled(lab):
        first = member(lab, "n1")
        assert members(lab, first).keys() == {first.id}
        second = member(lab, "n2")
        third = member(lab, "n1")  # on the node of the first one
        jobs = {job.id: job for job in (first, second, third)}
        names = {first.id: f"n1-j{first.id}", second.id: f"n2-j{second.id}", third.id: f"n1-j{third.id}"}
        assert "members 3" in said(lab, third)
        for job in jobs.values():
            known = members(lab, job)
            assert {number: row["host"] for number, row in known.items()} == names
            for number, row in known.items():
                assert calls(lab, job, names[number]) == str(number)
                assert calls(lab, job, str(row["ipv6"])) == str(number)
        old = str(members(lab, second)[first.id]["ipv4"])
        lab.run("login", "scancel", str(first.id), user="alice")
        until(lambda: members(lab, second).keys() == {second.id, third.id}, "the first member to be gone", 60)
        assert calls(lab, second, old).startswith("no ")
        assert calls(lab, third, names[second.id]) == str(second.id)
        fourth = member(lab, "n1")
        assert members(lab, fourth)[fourth.id]["ipv4"] != old, "not used again within an hour"
        end(lab, second, third, fourth)
        settled(lab)
        assert lab.vhpc("ctl", "cluster", "ls", "--all") == []
    for node in lab.nodes:
        assert "vhpcb" not in lab.run(node, "ip", "-o", "link").out


@pytest.mark.promise("cluster.grow")
def test_a_guest_that_dies_is_gone_for_the_others(lab: Lab) -> None:
    with cancelled(lab):
        stays, leaves = member(lab, "n1"), member(lab, "n2")
        events = f"/home/alice/events-{stays.id}"
        until(
            lambda: f'"job":{leaves.id}' in lab.run("login", "cat", events).out.replace(" ", ""), "a join", 60
        )
        begin = time.time()
        kill_qemu(lab, leaves, "n2")
        until(lambda: members(lab, stays).keys() == {stays.id}, "the dead guest to be gone", 60)
        rows = [json.loads(line) for line in lab.run("login", "cat", events).out.splitlines()]
        assert [(row["event"], row["job"]) for row in rows] == [
            ("join", stays.id),
            ("join", leaves.id),
            ("leave", leaves.id),
        ]
        print("gone after", float(lab.run("login", "stat", "-c", "%.3Y", events).out) - begin, "s")
        end(lab, stays)


def events(lab: Lab, job: Job) -> list[tuple[str, int]]:
    """The events of the others that the guest of a job has seen."""
    rows = [
        json.loads(line)
        for line in lab.run("login", "cat", f"events-{job.id}", user=job.user).out.splitlines()
    ]
    return [(row["event"], row["job"]) for row in rows if row["job"] != job.id]


@pytest.mark.promise("cluster.silent")
def test_guests_of_a_silent_node_are_gone_and_come_back(lab: Lab) -> None:
    with cancelled(lab):
        stays, silent = member(lab, "n1"), member(lab, "n2")
        address = lab.run("n1", "getent", "ahostsv4", "n2").out.split()[0]
        accepted = f"nft list ruleset | grep -c '{address}'; bridge fdb | grep -c 'dst {address}'"
        until(lambda: events(lab, stays) == [("join", silent.id)], "a join", 60)
        with unplugged(lab, "n2") as began:
            until(lambda: events(lab, stays)[1:] == [("leave", silent.id)], "the silent node to be gone", 60)
            ended = lab.run("login", "stat", "-c", "%.3Y", f"/home/alice/events-{stays.id}").out
            print("gone after", took := float(ended) - began, "s")
            assert took < limit(2.0)
            assert lab.run("n1", "sh", "-c", accepted, check=False).out.split() == ["0", "0"]
            third = member(lab, "n1")  # its start does not wait for the silent node
            assert members(lab, third).keys() == {stays.id, third.id}
        begin = time.time()
        until(lambda: members(lab, third).keys() == {stays.id, silent.id, third.id}, "it to be back", 60)
        print("back after", time.time() - begin, "s")
        assert calls(lab, third, f"n2-j{silent.id}") == str(silent.id)
        assert calls(lab, silent, f"n1-j{third.id}") == str(third.id)
        lab.service("ctl", "restart", "vhpcd")
        fourth = member(lab, "n2")
        assert members(lab, fourth).keys() == {stays.id, silent.id, third.id, fourth.id}
        seen = events(lab, stays)
        assert [event for event in seen if event[0] == "leave"] == [("leave", silent.id)]
        assert sorted(job for event, job in seen if event == "join") == sorted(
            [silent.id, silent.id, third.id, fourth.id]
        )
        end(lab, stays, silent, third, fourth)
        settled(lab)


@pytest.mark.promise("cluster.apart")
def test_a_cluster_of_another_user_is_another_one(lab: Lab) -> None:
    with cancelled(lab):
        hers, his = member(lab, "n1"), member(lab, "n1", user="bob")
        assert members(lab, hers).keys() == {hers.id}
        assert members(lab, his).keys() == {his.id}
        address = str(members(lab, hers)[hers.id]["ipv4"])
        # both clusters have the same addresses, so bob's guest reaches only itself there
        assert calls(lab, his, address) in (str(his.id), "no TimeoutError", "no OSError")
        end(lab, hers, his)


@pytest.mark.promise("cluster.follower")
def test_a_killed_follower_is_started_again_and_members_join(lab: Lab) -> None:
    with cancelled(lab):
        first = member(lab, "n1")
        lab.run("n1", "sh", "-c", f"kill -9 $(pgrep -f '[h]ooks.follower {first.id}[.]')")
        second = lab.submit(WAIT, *SMALL, "-w", "n2", "--vhpc-cluster=alpha")
        boots(lab, second, "n2")
        lab.run("n1", "vhpc", "reconcile")
        until(lambda: "members 2" in said(lab, second) or not second.queued(), "the second to join", 240)
        assert members(lab, first).keys() == {first.id, second.id}, said(lab, second)
        end(lab, first, second)
        settled(lab)


@pytest.mark.promise("cluster.restart")
def test_members_come_and_go_while_vhpcd_is_killed(lab: Lab) -> None:
    with cancelled(lab):
        stays, leaves = member(lab, "n1"), member(lab, "n2")
        lab.service("ctl", "kill", "vhpcd")
        lab.run("login", "scancel", str(leaves.id), user="alice")
        assert leaves.wait(timeout=180) == "CANCELLED"
        assert members(lab, stays).keys() == {stays.id, leaves.id}, "without vhpcd all stays as it is"
        lab.service("ctl", "start", "vhpcd")
        until(lambda: members(lab, stays).keys() == {stays.id}, "the member that has ended to be gone", 90)
        joins = lab.submit(WAIT, *SMALL, "-w", "n2", "--vhpc-cluster=alpha")
        boots(lab, joins, "n2")
        lab.service("ctl", "kill", "vhpcd")
        lab.service("ctl", "start", "vhpcd")
        until(lambda: "members 2" in said(lab, joins) or not joins.queued(), "the next one to join", 240)
        assert calls(lab, stays, f"n2-j{joins.id}") == str(joins.id), said(lab, joins)
        end(lab, stays, joins)
        settled(lab)
