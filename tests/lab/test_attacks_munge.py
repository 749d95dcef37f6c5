# SPDX-License-Identifier: Apache-2.0
"""A user of a node keeps its munged busy while jobs of others start and end there."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cluster import VLAB, Lab
from injection import until

pytestmark = pytest.mark.lab

FLOOD = (Path(__file__).parent / "mungeflood.py").read_text()
CONNECTIONS, SECONDS = "300", "75"
RELEASE_S = 60


@contextmanager
def flood(host: str) -> Iterator[None]:
    """Bob's connections to munged of a host, for SECONDS or until the block ends."""
    words = [VLAB, "exec", "-u", "bob", host, "--", "/usr/bin/python3", "-c", FLOOD, CONNECTIONS, SECONDS]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            process.terminate()
            process.wait(30)


def busy(lab: Lab, host: str) -> bool:
    return lab.run(host, "timeout", "1", "munge", "-n", check=False).code != 0


@pytest.mark.promise("munge.silent")
def test_a_flood_of_a_node_s_munged_fails_no_job_of_others(lab: Lab) -> None:
    """With and without guests the job waits, or is requeued, and runs when munged answers again."""
    with flood("n1"):
        until(lambda: busy(lab, "n1"), "a busy munged", 30)
        native = lab.submit("hostname", "-N1", "-n1", "-w", "n1", "--mem=200", image=None)
        job = lab.submit("uname -r", "-N1", "-n1", "-w", "n1", "--mem=700")
        assert native.wait(timeout=400) == "COMPLETED"
        assert job.wait(timeout=600) == "COMPLETED", job.told()
    until(lambda: not [line for line in lab.leases() if line.startswith(f"{job.id}.")], "release", RELEASE_S)
    state, reason = lab.node_state("n1")
    assert "drain" not in state.lower(), reason
