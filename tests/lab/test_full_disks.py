# SPDX-License-Identifier: Apache-2.0
"""Disks that are full, of a node and of a user's home: no node is drained, and nothing is left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from cluster import IMAGE, Lab
from injection import WAITING, ask_again, let_go, ours, runs, said, settled, until

pytestmark = [pytest.mark.lab, pytest.mark.slow]

JOURNALS = "/var/lib/vhpc/journal"


@contextmanager
def full(lab: Lab, node: str, folder: str, size: str, user: str = "root") -> Iterator[None]:
    """A small file system in a folder of a node, which a file of others fills."""
    lab.run(node, "mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder)
    try:
        lab.run(node, "chown", user, folder)
        lab.run(node, "dd", "if=/dev/zero", f"of={folder}/of-others", "bs=4k", check=False)
        yield
    finally:
        lab.run(node, "umount", "--lazy", folder)


@pytest.mark.promise("disk.full-state")
def test_a_node_without_room_for_journals_requeues_and_stays(lab: Lab) -> None:
    """The job starts when there is space."""
    with full(lab, "n1", JOURNALS, "64k"):
        job = lab.submit(WAITING, "-n1", "-w", "n1", user="bob")
        until(lambda: int(job.show()["Restarts"]) > 0, "the requeue", 240)
        assert "DRAIN" not in lab.node_state("n1")[0]
        log = lab.run("n1", "grep", f"job {job.id}:", "/var/log/vhpc/hooks.log").out
        assert f"no room for the journal {JOURNALS}" in log
        assert "Traceback" not in log
    ask_again(lab, job)
    runs(lab, job)
    let_go(lab, job)
    assert job.wait() == "COMPLETED", job.told()
    assert ours(said(lab, job)) == []
    settled(lab)


@pytest.mark.promise("user.full-home")
def test_a_full_home_is_its_users_affair(lab: Lab) -> None:
    """Files in it get the error of the file system; a script whose output is in it continues."""
    writes = "dd if=/dev/zero of=more count=1 && echo written"
    fails = f"{writes}; rm of-others; {writes}; exit 3"
    size = ("-n1", "--mem=600", "-w", "n1")
    with full(lab, "n1", "/home/alice", "64k", user="alice"):
        elsewhere = lab.finish(fails, *size, "--output=/scratch/full-%j.out")
        out = f"/scratch/full-{elsewhere.id}.out"
        told = lab.run("login", "cat", out).out
        assert elsewhere.accounted() == ["FAILED", "3:0"], told
        assert "No space left on device" in told
        assert told.endswith("written\n")
        assert told.count("written") == 1
        lab.run("n1", "dd", "if=/dev/zero", "of=/home/alice/of-others", "bs=4k", check=False)
        lost = f"for i in 1 2 3; do echo lost; sleep 1; done; hostname >> {out}; exit 5"
        for image in (IMAGE, None):
            assert lab.finish(lost, *size, image=image).accounted() == ["FAILED", "5:0"]
        assert lab.run("login", "cat", out).out == f"{told}n1\nn1\n"
        assert "DRAIN" not in lab.node_state("n1")[0]
    lab.run("login", "rm", "-f", out, user="alice")
    settled(lab)
