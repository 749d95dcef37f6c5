# SPDX-License-Identifier: Apache-2.0
"""MPI programs started by srun: MPICH by PMI, Open MPI by PMIx, in guests of image debian-hpc."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator

import pytest
from cluster import Job, Lab, publish
from injection import kill_qemu, ours, output_meets, said, settled, silent_nodes_are_down, unplugged, until
from mpi_program import RING, ring_lines

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(900)]

IMAGE = "debian-hpc"
NETWORK = "--vhpc-network=job"
PAIR = ("-N2", "--ntasks-per-node=2", "--mem=900")
KINDS = [("pmi2", "mpich"), ("pmix", "openmpi")]


@pytest.fixture(scope="module")
def programs(lab: Lab) -> Iterator[None]:
    """``~/ring.mpich`` and ``~/ring.openmpi``, compiled in a guest."""
    publish(IMAGE)
    build = "".join(f"mpicc.{name} -O1 -o ~/ring.{name} ~/ring.c\n" for _, name in KINDS)
    job = lab.finish(f"cat > ~/ring.c <<'END'\n{RING}\nEND\n{build}", "-N1", "-n2", "--mem=900", image=IMAGE)
    assert job.accounted() == ["COMPLETED", "0:0"], job.output()
    yield
    lab.run("login", "sh", "-c", "rm -f ~/ring.*", user="alice")


def _run(lab: Lab, script: str, *options: str) -> Job:
    job = lab.submit(f"{{\n{script}\n}} 2>&1", *options, image=IMAGE)
    job.wait(timeout=600)
    return job


def _lines(job: Job) -> Counter[str]:
    return Counter(job.output().splitlines())


def _sections(job: Job) -> list[str]:
    """The text after each ``== NAME`` at the begin of a line; a backtrace has such marks elsewhere."""
    return re.split(r"^== ", job.output(), flags=re.M)[1:]


@pytest.mark.promise("mpi.ranks")
@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize(("pmi", "mpi"), KINDS)
def test_ranks_of_two_nodes_find_each_other(lab: Lab, pmi: str, mpi: str) -> None:
    job = _run(lab, f"srun --mpi={pmi} -n4 ~/ring.{mpi}; echo exit $?", *PAIR, NETWORK)
    assert _lines(job) == ring_lines("n1", "n1", "n2", "n2") + Counter(["exit 0"])


@pytest.mark.promise("mpi.ranks")
@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize(("pmi", "mpi"), KINDS)
def test_several_guests_of_a_node_share_no_memory(lab: Lab, pmi: str, mpi: str) -> None:
    """Eight ranks in four guests: those of a guest may share memory, those of a node may not."""
    options = ("-N2", "--ntasks-per-node=2", "--vhpc-guests-per-node=2", "--mem=1800", NETWORK)
    share = "share" if mpi == "mpich" else ""
    job = _run(
        lab, f"srun -O --ntasks-per-node=4 --mpi={pmi} -n8 ~/ring.{mpi} {share}; echo exit $?", *options
    )
    right = ring_lines("n1-g0", "n1-g0", "n1-g1", "n1-g1", "n2-g0", "n2-g0", "n2-g1", "n2-g1")
    if share:
        right += Counter({f"shares 2 with {first}": 2 for first in (0, 2, 4, 6)})
        right += Counter([f"token {1 + sum(range(8))}"])
    assert _lines(job) == right + Counter(["exit 0"])


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize(("pmi", "mpi"), KINDS)
def test_ranks_of_a_guest_share_memory(lab: Lab, pmi: str, mpi: str) -> None:
    job = _run(lab, f"srun --mpi={pmi} -n4 ~/ring.{mpi} share; echo exit $?", *PAIR, NETWORK)
    right = ring_lines("n1", "n1", "n2", "n2") + Counter({"shares 2 with 0": 2, "shares 2 with 2": 2})
    assert _lines(job) == right + Counter(["token 7", "exit 0"])


@pytest.mark.promise("mpi.ranks")
@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize(("pmi", "mpi"), KINDS)
def test_exit_codes_and_dead_ranks_end_the_step(lab: Lab, pmi: str, mpi: str) -> None:
    """As on hosts: the step ends with a line that names the task."""
    run = f"timeout 120 srun --mpi={pmi} -n4"
    job = _run(
        lab,
        f"echo == code; {run} ~/ring.{mpi} code 5; echo exit $?\n"
        f"echo == die; {run} -K1 ~/ring.{mpi} die; echo exit $?\n"
        f"echo == abort; {run} ~/ring.{mpi} abort; echo exit $?\n"
        f"echo == after; {run} ~/ring.{mpi}; echo exit $?\n",
        *PAIR,
        NETWORK,
    )
    parts = {part.split("\n", 1)[0]: part for part in _sections(job)}
    assert parts["code"].endswith("\nexit 5\n"), parts
    assert re.search(r"srun: error: n1: task 1: Exited with exit code 5", parts["code"]), parts
    # the PMIx server of a node ends all its tasks
    assert re.search(r"srun: error: n1: (task |tasks 0-)1: Killed", parts["die"]), parts
    for name in ("die", "abort"):
        end = re.search(r"\nexit (\d+)\n$", parts[name])
        assert end is not None, parts
        assert int(end[1]) not in (0, 124), parts  # 124: timeout has ended it
    right = ring_lines("n1", "n1", "n2", "n2") + Counter(["after", "exit 0"])
    assert Counter(parts["after"].splitlines()) == right


GONE = "vhpc: the guest of job {job} on n2 is gone"
NO_ANSWER = "Timeout, server n2 not responding."
DAEMON = "PRTE has lost communication with a remote daemon."
PROXY = "unable to read (PMI )?command from proxy"
ENDS_WITHIN_S = 10.0
# mpirun starts its daemons by srun or ssh, and these the ranks. Slurm 24.11 sets the variable for srun.
WAYS = {
    "pmi2": ("srun --mpi=pmi2 -n4 ~/ring.mpich", GONE),
    "pmix": ("srun --mpi=pmix -n4 ~/ring.openmpi", GONE),
    "mpirun-mpich": ("mpirun.mpich -launcher slurm -n 4 ~/ring.mpich", GONE),
    "mpirun-openmpi": ("mpirun.openmpi -n 4 ~/ring.openmpi", GONE),
    "ssh-mpich": (
        "HYDRA_LAUNCHER_EXTRA_ARGS= mpirun.mpich -launcher ssh -f $VHPC_MACHINEFILE -n 4 ~/ring.mpich",
        f"{PROXY}|{NO_ANSWER}",
    ),
    "ssh-openmpi": (
        "mpirun.openmpi --prtemca plm ssh --hostfile $VHPC_HOSTFILE -n 4 ~/ring.openmpi",
        f"{DAEMON}|{NO_ANSWER}",
    ),
    "ssh": ("ssh -n n2 ~/ring.alone", NO_ANSWER),
}
# In place of an MPI program, without a server of PMI.
ALONE = "yes 'sum 1' | head -n 8\n[ $# = 0 ] || sleep 1000"


def _endless(lab: Lab, how: str) -> tuple[Job, float]:
    """A job in the middle of a program that does not end, and the seconds that it takes when it ends."""
    command, _ = WAYS[how]
    job = lab.submit(
        f"{{\ncat > ~/ring.alone <<'END'\n#!/bin/sh\n{ALONE}\nEND\nchmod +x ~/ring.alone\n"
        f"began=$(date +%s); {command} || exit 99; echo usual $(($(date +%s) - began + 1)); echo ==\n"
        f"{command} endless; echo exit $?\n}} 2>&1",
        "--no-requeue",
        *PAIR,
        NETWORK,
        image=IMAGE,
    )
    output_meets(
        job, lambda text: text.partition("==\n")[2].count("sum") >= 8, f"job {job.id} to compute", 400
    )
    usual = re.search(r"^usual (\d+)$", said(lab, job), re.M)
    assert usual is not None
    return job, float(usual[1])


def _ends(lab: Lab, job: Job, how: str, within_s: float) -> None:
    """The program ends within the time, says why, and does not look successful; nothing is left."""
    began = time.monotonic()
    job.wait("COMPLETING", "COMPLETED", "FAILED", timeout=240)
    took = time.monotonic() - began
    job.wait()
    text = said(lab, job)
    print(f"from the fault to the end of the job: {took:.1f} s, limit {within_s:.1f} s\n{text}")
    ended = re.search(r"^\W?exit (\d+)$", text, re.M)
    assert ended is not None, text
    assert re.search(WAYS[how][1].format(job=job.id), text), text
    assert ended[1] != "0", text
    assert took < within_s, text
    settled(lab)


@pytest.mark.promise("mpi.daemon-lost", "net.keepalive")
@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize("how", WAYS)
def test_a_guest_that_dies_ends_the_program(lab: Lab, how: str) -> None:
    """Its ranks never finish: those of the other guest wait for the dead ones."""
    job, usual_s = _endless(lab, how)
    kill_qemu(lab, job, "n2")
    _ends(lab, job, how, ENDS_WITHIN_S + usual_s)


@pytest.mark.promise("mpi.network-cut")
@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize("how", ["ssh-mpich", "ssh-openmpi"])
def test_mpirun_by_ssh_ends_when_the_network_is_cut(lab: Lab, how: str) -> None:
    """Before Slurm notices: the first node, its script and its own ranks continue without the other one."""
    job, usual_s = _endless(lab, how)
    with unplugged(lab, "n2"):
        ended = re.compile(r"^\W?exit [1-9]\d*$", re.M)
        output_meets(job, ended.search, "mpirun to end", ENDS_WITHIN_S + usual_s)
        assert re.search(WAYS[how][1], said(lab, job)), said(lab, job)
    job.wait(timeout=300)
    settled(lab, 300)


@pytest.mark.promise("mpi.network-cut", "clean.untold")
@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize("how", ["pmi2", "pmix", "mpirun-openmpi"])
def test_a_step_ends_when_the_network_is_cut(lab: Lab, how: str) -> None:
    """Slurm takes the node for down after SlurmdTimeout, and ends the job as on hosts.

    Open MPI's mpirun would return 0 if it noticed the loss of a daemon before.
    """
    job, _ = _endless(lab, how)
    with silent_nodes_are_down(lab), unplugged(lab, "n2"):
        assert job.wait(timeout=120) == "NODE_FAIL"
        until(lambda: not lab.run("n1", "virsh", "-q", "list", "--name").out.strip(), "n1 to be free", 120)
    until(lambda: "DOWN" not in lab.node_state("n2")[0], "the node to be back", 120)
    settled(lab, 300)


@pytest.mark.promise("mpi.interface")
@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize(("pmi", "mpi"), KINDS)
def test_other_interfaces_are_not_used(lab: Lab, pmi: str, mpi: str) -> None:
    """With an interface whose address is the same in both guests, as that of a NAT is."""
    decoy = (
        "sudo ip link add decoy type veth peer name ycoed && sudo ip link set ycoed up && "
        "sudo ip address add 10.1.0.2/24 dev decoy && sudo ip link set decoy up && "
        "ip -o -4 address show decoy"
    )
    job = _run(
        lab,
        f"srun -N2 --ntasks-per-node=1 sh -c '{decoy}' | grep -c 10.1.0.2\n"
        f"srun --mpi={pmi} -n4 ~/ring.{mpi}; echo exit $?",
        *PAIR,
        NETWORK,
    )
    assert _lines(job) == ring_lines("n1", "n1", "n2", "n2") + Counter(["2", "exit 0"])


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
def test_mpirun_starts_ranks_in_its_guest(lab: Lab, mpi: str) -> None:
    job = _run(lab, f"mpirun.{mpi} -np 2 ~/ring.{mpi}; echo exit $?", "-N1", "-n2", "-w", "n1", "--mem=900")
    assert _lines(job) == ring_lines("n1", "n1") + Counter(["exit 0"])


@pytest.mark.promise("mpi.no-network")
@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize("command", ["mpirun.mpich", "mpiexec.mpich", "mpirun.openmpi", "mpiexec.openmpi"])
def test_mpirun_without_a_network_ends_with_one_line(lab: Lab, command: str) -> None:
    """By itself that of Open MPI crashes, also with its stderr in a pipe, and that of MPICH never ends."""
    program = f"~/ring.{command.partition('.')[2]}"
    run = f"timeout --foreground 120 {command} -n 4 {program}"
    job = _run(lab, f"{run}; echo exit $?; ({run} 2>&1; echo exit $?) | cat", *PAIR)
    found = job.output().splitlines()
    line = found[0]
    assert "starts an MPI program in several guests" in line
    assert line.endswith("have no network between them: submit the job with --vhpc-network=job")
    assert found == [line, "exit 126", line, "exit 126"]


@pytest.mark.promise("mpi.refuse")
@pytest.mark.usefixtures("programs")
def test_requests_that_slurms_pmi_lacks_are_refused(lab: Lab) -> None:
    """A second MPI_Init by PMI-1 or PMI-2; MPI_Comm_spawn, for which the libraries have their own texts."""
    run = "timeout 120 srun"
    job = _run(
        lab,
        f"echo == twice; {run} --mpi=pmi2 -n4 sh -c '~/ring.mpich && ~/ring.mpich'; echo exit $?\n"
        f"echo == pmi2; {run} --mpi=pmi2 -n4 ~/ring.mpich spawn; echo exit $?\n"
        f"echo == pmix; {run} --mpi=pmix -n4 ~/ring.openmpi spawn; echo exit $?\n",
        *PAIR,
        NETWORK,
    )
    parts = dict(part.split("\n", 1) for part in _sections(job))
    for name, part in parts.items():
        end = re.search(r"^exit (\d+)$", part, re.M)
        assert end is not None, part
        assert int(end[1]) not in (0, 124), (name, part)  # 124: timeout has ended it
        assert len(re.findall(r"^rank \d of 4", part, re.M)) == 4, part
    assert set(ours(parts["twice"])) == {
        f"vhpc: step {job.id}.0 runs a second MPI program in one task, which Slurm's PMI-1 and PMI-2 do not "
        "offer: start each MPI program with an srun of its own"
    }
    # MPICH of Debian, with UCX, does not even ask its PMI server
    assert "MPI_Comm_spawn" in parts["pmi2"], parts["pmi2"]
    assert set(ours(parts["pmix"])) == {
        f"vhpc: step {job.id}.2 calls MPI_Comm_spawn, which is not possible with srun --mpi=pmix: start the "
        "program with mpirun"
    }
