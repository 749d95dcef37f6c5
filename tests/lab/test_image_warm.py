# SPDX-License-Identifier: Apache-2.0
"""vhpc image warm: nodes have an image before a job needs it, copied by Slurm's own srun."""

from __future__ import annotations

import json

import pytest
from cluster import IMAGE, NODES, Lab

pytestmark = pytest.mark.lab

BLOBS = "/var/lib/vhpc/images/blobs/sha256"
CATALOG = "/shared/vhpc/catalog"


def files(lab: Lab) -> dict[str, int]:
    """sha256 and size of the image's files, as its manifest has them."""
    digest = lab.run("ctl", "cat", f"{CATALOG}/names/{IMAGE}/latest").out.strip()
    manifest = json.loads(lab.run("ctl", "cat", f"{CATALOG}/manifests/sha256/{digest[7:]}.json").out)
    return {manifest[part]["sha256"]: manifest[part]["size"] for part in ("kernel", "initrd", "root")}


def forget(lab: Lab, node: str, names: dict[str, int]) -> None:
    lab.run(node, "rm", "-f", *(f"{BLOBS}/{name}" for name in names))


def inodes(lab: Lab, node: str, names: dict[str, int]) -> list[str]:
    """Inodes of the files: a copy that was made again has another one."""
    return lab.run(node, "stat", "-c", "%i", *(f"{BLOBS}/{name}" for name in names)).out.split()


def test_a_warmed_node_copies_nothing_when_a_job_starts(lab: Lab) -> None:
    names = files(lab)
    for node in NODES:
        lab.run(node, "vhpc", "image", "stage", IMAGE)  # the list of the root's chunks stays
        forget(lab, node, names)
    done = lab.run("login", "vhpc", "image", "warm", IMAGE, "-w", "n[1-2]", "--json", timeout=600)
    nodes = json.loads(done.out)["nodes"]
    size = sum(names.values())
    assert [(one["node"], one["copied"], one["problem"]) for one in nodes] == [(n, size, "") for n in NODES]
    assert done.err.splitlines()[-1] == "vhpc: 2 of 2 nodes done"
    for node in NODES:
        sums = lab.run(node, "sha256sum", *(f"{BLOBS}/{name}" for name in names)).out
        assert [line.split()[0] for line in sums.splitlines()] == list(names)
    lab.quiet()
    before = {node: inodes(lab, node, names) for node in NODES}
    job = lab.finish("srun hostname", "-N2")
    assert sorted(job.output().split()) == list(NODES)
    assert {node: inodes(lab, node, names) for node in NODES} == before, "the job has copied nothing"
    shown = {one["node"]: one["stages"] for one in lab.vhpc("ctl", "timeline", str(job.id))["nodes"]}
    took = {node: [one["took_s"] for one in shown[node] if one["name"] == "image"] for node in NODES}
    assert all(len(seconds) == 1 for seconds in took.values()), took
    print("seconds of a warm: ", {one["node"]: one["seconds"] for one in nodes}, "of the jobs' stage:", took)


def test_an_image_that_is_there_is_not_copied_again(lab: Lab) -> None:
    names = files(lab)
    lab.run("n1", "vhpc", "image", "stage", IMAGE)
    before = inodes(lab, "n1", names)
    again = lab.vhpc("login", "image", "warm", IMAGE, "-w", "n1")
    assert [one["copied"] for one in again["nodes"]] == [0]
    assert inodes(lab, "n1", names) == before
    assert lab.run("n1", "vhpc", "image", "stage", IMAGE).out.endswith(" is in the store already\n")


def test_an_impossible_warming_is_refused_with_one_line(lab: Lab) -> None:
    cases = (
        ("root", (IMAGE, "-w", "n1,n99"), "the cluster has no node n99"),
        ("root", ("own/mine", "-w", "n1"), "copies images of the site only"),
        ("root", ("no-such-image", "-w", "n1"), "image no-such-image:latest is unknown"),
        ("alice", (IMAGE, "-w", "n1"), "vhpc image warm needs root"),
    )
    for user, argv, says in cases:
        done = lab.run("login", "vhpc", "image", "warm", *argv, user=user, check=False)
        assert done.code == 1, done
        assert says in done.err
        assert done.err.count("\n") == 1


def test_a_drained_node_is_named_and_the_other_is_warmed(lab: Lab) -> None:
    names = files(lab)
    forget(lab, "n1", names)
    lab.run("ctl", "scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=test")
    try:
        argv = ("vhpc", "image", "warm", IMAGE, "-w", "n[1-2]")
        done = lab.run("login", *argv, check=False, timeout=600)
    finally:
        lab.resume("n2")
    assert done.code == 1
    assert "vhpc: n2: it is drained" in done.err
    assert inodes(lab, "n1", names)


@pytest.mark.slow  # two minutes of waiting
def test_a_busy_node_is_reported_and_its_job_continues(lab: Lab) -> None:
    job = lab.submit("sleep 600", "-w", "n1", "--exclusive", image=None)
    job.wait("RUNNING")
    done = lab.run("login", "vhpc", "image", "warm", IMAGE, "-w", "n1", check=False, timeout=300)
    assert done.code == 1
    assert "vhpc: n1: no CPU or memory of it was free for a job within 120 s" in done.err
    assert job.show()["JobState"] == "RUNNING"
    left = lab.run("ctl", "squeue", "-h", "-o", "%i").out.split()
    assert left == [str(job.id)], "the request for the busy node has left the queue"
