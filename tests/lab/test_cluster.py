# SPDX-License-Identifier: Apache-2.0
"""Named clusters: the jobs of a user form one private network, which grows and shrinks with them."""

from __future__ import annotations

import json
import time

import pytest
from cluster import Lab
from cluster_jobs import SMALL, WAIT, calls, cancelled, end, member, members
from injection import boots, kill_qemu, said, settled, until

pytestmark = [pytest.mark.lab, pytest.mark.timeout(600)]


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
