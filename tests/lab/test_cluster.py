# SPDX-License-Identifier: Apache-2.0
"""Named clusters: the jobs of a user form one private network, which grows and shrinks with them."""

from __future__ import annotations

import json
import time

import pytest
from cluster import Job, Lab
from cluster_jobs import SMALL, WAIT, awaited, booted, calls, cancelled, end, member, members
from injection import boots, kill_qemu, prints, said, settled, unplugged, until

from pace import limit

pytestmark = [pytest.mark.lab, pytest.mark.timeout(600)]


@pytest.mark.promise("cluster.grow")
def test_jobs_join_reach_each_other_and_leave(lab: Lab) -> None:
    with cancelled(lab):
        first = member(lab, "n1")
        assert members(lab, first).keys() == {first.id}
        # the third one is on the node of the first one
        second, third = booted(lab, "n2"), booted(lab, "n1")
        awaited(lab, second, third)
        jobs = {job.id: job for job in (first, second, third)}
        names = {first.id: f"n1-j{first.id}", second.id: f"n2-j{second.id}", third.id: f"n1-j{third.id}"}
        assert any("members 3" in said(lab, job) for job in (second, third))
        for job in jobs.values():
            known = members(lab, job)
            assert {number: row["host"] for number, row in known.items()} == names
            hosts = [name for number, row in known.items() for name in (names[number], str(row["ipv6"]))]
            assert calls(lab, job, *hosts).split() == [str(number) for number in known for _ in range(2)]
        old = str(members(lab, second)[first.id]["ipv4"])
        lab.run("login", "scancel", str(first.id), user="alice")
        until(lambda: members(lab, second).keys() == {second.id, third.id}, "the first member to be gone", 60)
        assert calls(lab, second, old).startswith("no ")
        assert calls(lab, third, names[second.id]) == str(second.id)
        fourth = member(lab, "n1")
        assert members(lab, fourth)[fourth.id]["ipv4"] != old, "not used again within an hour"
        kill_qemu(lab, second, "n2")
        until(lambda: members(lab, third).keys() == {third.id, fourth.id}, "the dead guest to be gone", 60)
        end(lab, third, fourth)
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
        prints(second, "members 2", 240)
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
        prints(joins, "members 2", 240)
        assert calls(lab, stays, f"n2-j{joins.id}") == str(joins.id), said(lab, joins)
        end(lab, stays, joins)
        settled(lab)
