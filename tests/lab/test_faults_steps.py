# SPDX-License-Identifier: Apache-2.0
"""Steps of several guests that lose one of them, or a server of Slurm: no task waits without end."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import pytest
from cluster import Job, Lab, without_retries
from injection import kill_qemu, ours, runs, said, settled

pytestmark = pytest.mark.lab

NETWORK = "--vhpc-network=job"
PAIR = ("-N2", "--ntasks-per-node=2", NETWORK)
ENDS_WITHIN_S = 10.0
LATER = 3
"""Steps that need a guest which is gone."""
KILL_WAIT_S = 10.0  # lab/etc/slurm.conf.in; then srun stops waiting for a slurmstepd that is not there

# A client of PMI-1, after MPICH's documents of the protocol, that never ends: as an MPI program in the
# middle of its work it waits for all other tasks, again and again.
PMI = """
import os, time
pmi = os.fdopen(int(os.environ["PMI_FD"]), "r+b", buffering=0)
def ask(text):
    pmi.write(text.encode() + b"\\n")
    return b"".join(iter(lambda: pmi.read(1), b"\\n"))
assert b" rc=0 " in ask("cmd=init pmi_version=1 pmi_subversion=1")
ask("cmd=barrier_in")
print("up", flush=True)
while True:
    ask("cmd=barrier_in")
    time.sleep(0.2)
"""
# One of no PMI: like a daemon of mpirun.
PLAIN = "import time; print('up', flush=True); time.sleep(1000)"


@pytest.fixture(scope="module")
def usual_s(lab: Lab) -> float:
    """What Slurm takes for a step without guests on a machine that other tests load too, in seconds."""
    began = time.monotonic()
    lab.run("login", "srun", "-N2", "-n4", "true", user="alice")
    return time.monotonic() - began


def start(lab: Lab, program: str, mpi: str, *more: str) -> Job:
    """A job of 4 tasks in the middle of its step."""
    lab.run("login", "sh", "-c", "cat > ~/endless.py", user="alice", stdin=program)
    job = lab.submit(f"srun --mpi={mpi} -n4 python3 ~/endless.py; echo step said $?", *PAIR, *more)
    runs(lab, job, times=4)
    return job


def ends(lab: Lab, job: Job, usual_s: float, fault: Callable[[], object], why: str) -> None:
    """The job ends soon after a fault, with one line, which two tasks may say, and leaves nothing."""
    began = time.monotonic()
    fault()
    state = job.wait("COMPLETING", "COMPLETED", "FAILED")
    took = time.monotonic() - began
    text = said(lab, job)
    print(f"from the fault to the end of the job: {took:.1f} s ({state})\n{text}")
    job.wait()
    (line,) = set(ours(text))
    assert line == f"vhpc: the guest of job {job.id} on n2 is gone ({why}); this ends step {job.id}.0"
    assert "step said 0" not in text
    assert took < ENDS_WITHIN_S + usual_s, text
    assert job.accounted("State", ".0")[0].startswith(("CANCELLED", "FAILED"))
    settled(lab)


@pytest.mark.promise("step.guest-lost")
@pytest.mark.parametrize(("program", "mpi"), [(PMI, "pmi2"), (PLAIN, "none")], ids=["pmi2", "none"])
def test_a_dead_guest_ends_the_step_of_all_guests(lab: Lab, usual_s: float, program: str, mpi: str) -> None:
    """Without srun's --kill-on-bad-exit: the tasks of the other guest would wait without end."""
    job = start(lab, program, mpi)
    ends(lab, job, usual_s, lambda: kill_qemu(lab, job, "n2"), "channel closed")


@pytest.mark.promise("step.guest-lost")
def test_a_killed_shim_ends_the_step_of_all_guests(lab: Lab, usual_s: float) -> None:
    job = start(lab, PMI, "pmi2")
    ends(lab, job, usual_s, lambda: lab.run("n2", "pkill", "-9", "-x", "vhpc-shim"), "channel closed")


@pytest.mark.promise("step.guest-lost")
def test_a_step_survives_a_dead_guest_if_its_user_wants_it(lab: Lab) -> None:
    """As with srun --no-kill, when a whole node fails; a later step that needs the guest ends at once."""
    script = "export SLURM_NO_KILL=set\n" + (
        "srun -n2 -N2 sh -c 'echo up; [ $SLURM_NODEID = 1 ] || sleep 6; [ $SLURM_NODEID = 1 ] && sleep 100;"
        " echo $SLURMD_NODENAME went on'; unset SLURM_NO_KILL\n"
        f"for i in $(seq {LATER}); do srun -n2 -N2 sleep 100; echo later said $?; done"
    )
    job = lab.submit(script, *PAIR)
    runs(lab, job, times=2)
    kill_qemu(lab, job, "n2")
    job.wait()
    text = without_retries(said(lab, job))
    assert "n1 went on\n" in text, text
    # 137: the task of n1 was ended. 125, of n2, counts if n1's was ended before its program started.
    assert len(re.findall(r"^later said (?:137|125)$", text, re.M)) == LATER, text
    lost, *later = ours(text)
    assert lost == f"vhpc: the guest of job {job.id} on n2 is gone (channel closed)"
    assert all(line.startswith(f"vhpc: the guest of job {job.id} on n2 is gone") for line in later), later
    ends = [f"this ends step {job.id}.{step}" for step in range(1, LATER + 1)]
    assert [line.rpartition("; ")[2] for line in later] == ends, text
    settled(lab)


# --- Slurm's own servers -------------------------------------------------------------------------

# The worst client of PMIx: connects to its server, and does not care when that is gone.
PMIX = """
import os, socket, time
(port,) = {os.environ[name].rpartition(":")[2] for name in os.environ if name.startswith("PMIX_SERVER_URI")}
link = socket.create_connection(("127.0.0.1", int(port)))
print("up", flush=True)
time.sleep(1000)
"""


@pytest.mark.promise("step.slurmstepd")
@pytest.mark.parametrize(("program", "mpi"), [(PMIX, "pmix"), (PLAIN, "none")], ids=["pmix", "none"])
def test_a_killed_slurmstepd_ends_the_step_of_all_guests(
    lab: Lab, usual_s: float, program: str, mpi: str
) -> None:
    """It serves PMI and PMIx. On hosts such a step waits until its job is cancelled."""
    if mpi == "pmix" and not lab.has_pmix():
        pytest.skip(f"this Slurm has no --mpi={mpi}: its libpmix is not installed (seen on Debian 12)")
    job = start(lab, program, mpi)
    began = time.monotonic()
    lab.run("n2", "pkill", "-KILL", "-f", rf"^slurmstepd: \[{job.id}\.0")
    state = job.wait("COMPLETING", "COMPLETED", "FAILED")
    took = time.monotonic() - began
    text = said(lab, job)
    print(f"from the kill to the end of the job: {took:.1f} s ({state})\n{text}")
    job.wait()
    assert re.search(rf"error: \*\*\* STEP {job.id}\.0 ON n1 CANCELLED AT ", text), text
    assert "step said 0" not in text
    assert took < KILL_WAIT_S + ENDS_WITHIN_S + usual_s
    settled(lab)
