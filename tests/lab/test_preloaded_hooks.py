# SPDX-License-Identifier: Apache-2.0
"""Prolog and Epilog in the process that an Epilog leaves on a node: started, used, killed."""

from __future__ import annotations

import pytest
from cluster import Lab
from injection import in_boot, said, until

pytestmark = [pytest.mark.lab, pytest.mark.promise("hooks.preloaded")]
WAITS = ("pgrep", "-f", "[h]ooks.preloaded")
BUSY = "pgrep -x vhpc-prolog >/dev/null"
"""Succeeds while a Prolog runs in the process."""


def waiting(lab: Lab) -> str:
    """Pid of the process that waits for hooks on n1; empty while there is none, or it is still starting."""
    found = lab.run("n1", *WAITS, check=False).out.split()
    listens = lab.run("n1", "test", "-S", "/run/vhpc/hooks/socket", check=False).code == 0
    return found[0] if listens and found else ""


def test_hooks_after_the_first_job_run_in_a_waiting_process(lab: Lab) -> None:
    assert lab.finish("true", "-w", "n1").show()["JobState"] == "COMPLETED"
    first = until(lambda: waiting(lab), "a process that waits for hooks")

    job = lab.submit("echo ran", "-w", "n1")
    in_boot(lab, job, "n1", f"{BUSY} && kill -9 {first}")
    assert job.wait() == "COMPLETED", "its Prolog ran in a child of the process, which needs it no longer"
    assert said(lab, job) == "ran\n"

    # its Epilog found no process, and left another one
    second = until(lambda: waiting(lab), "another process that waits for hooks")
    assert second != first
    lab.assert_clean()

    job = lab.submit("echo never", "-w", "n1")
    in_boot(lab, job, "n1", f"{BUSY} && pkill -9 -f '[v]hpc-node-hook prolog'")
    gone = lab.run(
        "n1", "sh", "-c", f"for i in $(seq 100); do {BUSY} || exit 0; sleep 0.1; done; exit 1", check=False
    )
    assert gone.code == 0, "a Prolog ends with the program that slurmd has killed"
    until(lambda: "DRAIN" in lab.run("ctl", "scontrol", "-o", "show", "node", "n1").out, "a drained node")
    assert "Prolog" in lab.run("ctl", "sinfo", "-h", "-R", "-n", "n1", "-o", "%E").out
    lab.run("ctl", "scancel", str(job.id))
    lab.quiet()
    lab.run("ctl", "scontrol", "update", "nodename=n1", "state=resume")
    lab.assert_clean()
