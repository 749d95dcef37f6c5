# SPDX-License-Identifier: Apache-2.0
"""Members of a cluster that are no simple jobs: several guests, components, preempted, made smaller."""

from __future__ import annotations

import json

import pytest
from cluster import IMAGE, Job, Lab
from cluster_jobs import SMALL, WAIT, calls, cancelled, end, inside, member, members
from injection import ask_again, output_meets, prints, settled, until

pytestmark = [pytest.mark.lab, pytest.mark.timeout(900)]


def hosts(lab: Lab, job: Job) -> set[str]:
    """Names of the guests that a guest of a job knows, the same in all of its files."""
    script = "cd /run/vhpc/cluster; cut -d' ' -f1 hostfile; cut -d: -f1 machinefile; cat hosts"
    names = inside(lab, job, "sh", "-c", script).split()
    found = set(names)
    assert len(names) == 3 * len(found)
    return found


def reached(lab: Lab, job: Job, *names: str) -> bool:
    """Whether a guest of a job reaches others by IPv4 and IPv6."""
    ping = "for name in $0; do for v in 4 6; do ping -$v -c1 -W20 $name; done || exit; done"
    return " 0% packet loss" in inside(lab, job, "sh", "-c", ping, " ".join(names))


def events(lab: Lab, job: Job, other: Job) -> list[str]:
    """The joins and leaves of a member, as a guest of another one was told."""
    rows = lab.run("login", "cat", f"/home/alice/events-{job.id}").out.splitlines()
    return [row["event"] for row in map(json.loads, rows) if row["job"] == other.id]


@pytest.mark.promise("cluster.grow")
def test_guests_of_a_node_and_components_are_members(lab: Lab) -> None:
    with cancelled(lab):
        stays = member(lab, "n2")
        own = f"n2-j{stays.id}"
        several = member(lab, "n1", "-n2", "--vhpc-guests-per-node=2", "--mem=1000")
        names = [f"n1-g{index}-j{several.id}" for index in (0, 1)]
        assert hosts(lab, several) == hosts(lab, stays) == {own, *names}
        assert reached(lab, stays, *names)
        assert (calls(lab, stays, names[0]), calls(lab, several, own)) == (str(several.id), str(stays.id))
        end(lab, several)
        component = ("-N1", *SMALL, f"--vhpc-image={IMAGE}", "--vhpc-cluster=alpha")
        words = ("-w", "n1", *component, ":", "-w", "n2", *component)
        script = f"#!/bin/sh\n{WAIT}\n"
        number = int(lab.run("login", "sbatch", "--parsable", *words, user="alice", stdin=script).out)
        het = Job(lab, number, "alice")
        prints(het, "members 3", 240)
        assert het.queued(), het.told()
        names = [f"n1-j{number}", f"n2-j{number}"]
        assert hosts(lab, het) == hosts(lab, stays) == {own, *names}
        assert reached(lab, stays, *names)
        assert reached(lab, het, own)
        end(lab, het)
        until(lambda: hosts(lab, stays) == {own}, "the components to be gone", 60)
        assert events(lab, stays, several) == ["join", "join", "leave", "leave"]
        assert events(lab, stays, het) == ["join", "join", "leave", "leave"]
        end(lab, stays)
        settled(lab)


@pytest.mark.promise("cluster.grow")
def test_a_preempted_member_comes_back_with_another_address(lab: Lab) -> None:
    with cancelled(lab):
        stays = member(lab, "n2")
        gives_way = member(lab, "n1", "-p", "spare", "--requeue", "--open-mode=append", "--exclusive")
        old = members(lab, stays)[gives_way.id]["ipv4"]
        urgent = lab.submit("true", "-p", "urgent", "-w", "n1", "--exclusive", image=None)
        assert urgent.wait() == "COMPLETED"
        until(lambda: gives_way.id not in members(lab, stays), "the preempted member to be gone", 60)
        ask_again(lab, gives_way)
        output_meets(gives_way, lambda text: text.count("members 2") == 2, "the member to come back", 240)
        assert members(lab, stays)[gives_way.id]["ipv4"] != old
        assert calls(lab, stays, f"n1-j{gives_way.id}") == str(gives_way.id)
        assert events(lab, stays, gives_way) == ["join", "leave", "join"]
        end(lab, stays, gives_way)
        settled(lab)


# Slurm sometimes refuses to make a job smaller, or drains the released node: lab/test_resize.py.
@pytest.mark.slow
@pytest.mark.promise("cluster.grow")
def test_a_node_that_a_member_releases_is_gone_for_the_others(lab: Lab) -> None:
    with cancelled(lab):
        stays = member(lab, "n2")
        smaller = member(lab, "n1,n2", "-N2", "-n2")
        names = {f"{node}-j{smaller.id}" for node in ("n1", "n2")}
        assert hosts(lab, stays) == hosts(lab, smaller) == {f"n2-j{stays.id}", *names}
        lab.run("login", "scontrol", "update", f"JobId={smaller.id}", "NumNodes=1", user="alice")
        until(lambda: f"n2-j{smaller.id}" not in hosts(lab, stays), "the released guest to be gone", 60)
        until(lambda: f"n2-j{smaller.id}" not in hosts(lab, smaller), "its own job to know it", 120)
        assert hosts(lab, stays) == hosts(lab, smaller) == {f"n2-j{stays.id}", f"n1-j{smaller.id}"}
        assert calls(lab, stays, f"n1-j{smaller.id}") == str(smaller.id)
        assert events(lab, stays, smaller) == ["join", "join", "leave"]
        end(lab, stays, smaller)
        settled(lab)
