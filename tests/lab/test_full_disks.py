# SPDX-License-Identifier: Apache-2.0
"""A disk of a node that is full: its jobs are requeued, and the node is not drained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from cluster import Lab
from injection import WAITING, ask_again, let_go, ours, runs, said, settled, until

pytestmark = [pytest.mark.lab, pytest.mark.slow]

JOURNALS = "/var/lib/vhpc/journal"


@contextmanager
def full(lab: Lab, node: str, folder: str, size: str) -> Iterator[None]:
    """A small file system in a folder of a node, which a file of others fills."""
    lab.run(node, "mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder)
    try:
        lab.run(node, "dd", "if=/dev/zero", f"of={folder}/of-others", "bs=4k", check=False)
        yield
    finally:
        lab.run(node, "umount", "--lazy", folder)


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
