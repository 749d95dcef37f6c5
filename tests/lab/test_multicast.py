# SPDX-License-Identifier: Apache-2.0
"""Multicast on job networks: all guests of a job that asked hear it, and no guest of another job."""

from __future__ import annotations

import pytest
from cluster import NODES, Job, Lab
from frames import MASQUERADE, TALK
from injection import let_go, until

pytestmark = pytest.mark.lab


def discovery(lab: Lab, user: str, network: str, expected: tuple[str, ...]) -> Job:
    """A job whose two guests tell each other words by broadcast, multicast and directly."""
    for name, program in (("talk.py", TALK), ("masquerade.py", MASQUERADE)):
        lab.run("login", "sh", "-c", f"cat > {name}", user=user, stdin=program)
    words = " ".join(f"$peer-$SLURM_JOB_ID-{word}" for word in expected)
    if "multicast" in network:
        words += " genuine"  # the last of what masquerade.py sends
    return lab.submit(
        "cat > ~/discover.sh <<'END'\n"
        "peer=n1; [ $(hostname) = n1 ] && peer=n2\n"
        "python3 -c 'print()'; touch ~/up-$SLURM_JOB_ID-$(hostname)\n"
        "until [ -e ~/go-$SLURM_JOB_ID ]; do sleep 0.2; done\n"
        "(until [ -e ~/over-$SLURM_JOB_ID-$peer ]; do sudo python3 ~/masquerade.py; sleep 1; done) &\n"
        f"python3 ~/talk.py $(hostname)-$SLURM_JOB_ID $peer 10 {words}\n"
        "touch ~/over-$SLURM_JOB_ID-$(hostname); wait\n"
        "END\n"
        "srun -N2 --ntasks-per-node=1 sh ~/discover.sh\n",
        "-N2",
        f"--vhpc-network={network}",
        "--chdir=/home/" + user,
        user=user,
    )


@pytest.mark.promise("net.multicast", "attack.multicast")
def test_multicast_reaches_the_guests_of_its_job_alone(lab: Lab) -> None:
    """Two jobs at once on the same nodes with the same addresses: one asked for multicast, one did not."""
    everything = ("bcast", "mc4", "mc6", "uni")
    jobs = [
        discovery(lab, "alice", "job,multicast", everything),
        discovery(lab, "bob", "job", ("uni",)),
    ]
    for job in jobs:
        names = [f"/home/{job.user}/up-{job.id}-{node}" for node in NODES]
        until(lambda n=names: lab.run("login", "ls", *n, check=False).code == 0, "both guests", 240)  # type: ignore[misc]
    for job in jobs:
        let_go(lab, job)
    for job, words in zip(jobs, (everything, ("uni",)), strict=True):
        assert job.wait() == "COMPLETED"
        lines = {line for line in job.output().splitlines() if " heard" in line}
        expected = {
            here: sorted([f"{there}-{job.id}-{word}" for word in words] + ["genuine"] * ("mc4" in words))
            for here, there in zip(NODES, reversed(NODES), strict=True)
        }
        assert lines == {f"{here}-{job.id} heard {' '.join(said)}" for here, said in expected.items()}
