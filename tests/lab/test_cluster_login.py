# SPDX-License-Identifier: Apache-2.0
"""vhpc cluster login: a front end of a cluster, from which programs reach all of its guests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from cluster import Done, Job, Lab, publish
from cluster_jobs import cancelled, end, member, members
from injection import settled

pytestmark = [pytest.mark.lab, pytest.mark.timeout(900)]

HPC = "debian-hpc"
LOGIN = ("vhpc", "cluster", "login", "alpha")
SUM = "from mpi4py import MPI; world = MPI.COMM_WORLD; print('sum', world.allreduce(world.rank + 1))"


def login(lab: Lab, *words: str) -> Done:
    return lab.run("login", *LOGIN, *words, user="alice", timeout=400, check=False)


@pytest.mark.promise("cluster.login")
def test_a_command_runs_in_a_new_guest_of_the_cluster(lab: Lab) -> None:
    with cancelled(lab):
        first, second = member(lab, "n1"), member(lab, "n2")
        program = (
            "for name in $(cat $WCOLL); do ping -c1 -W20 $name >/dev/null && echo reached $name; done\n"
            "cut -d: -f1 $HYDRA_HOST_FILE | sort; echo cpus $(nproc) job $VHPC_CLUSTER_JOB; exit 7"
        )
        said = login(lab, "--", "sh", "-c", program)
        assert said.code == 7, said
        own = int(said.out.split()[-1])
        names = [f"n1-j{first.id}", f"n2-j{second.id}"]
        assert f"cpus 1 job {own}\n" in said.out
        reached = [line.split()[1] for line in said.out.splitlines() if line.startswith("reached ")]
        assert reached[:2] == names
        assert reached[2].endswith(f"-j{own}")
        assert [line for line in said.out.splitlines() if line.startswith("n")] == sorted(reached)
        row = lab.run("ctl", "sacct", "-nXP", "-j", str(own), "-o", "JobName,Partition,User,NCPUS").out
        assert row == "login-alpha|main|alice|1\n"
        assert members(lab, first).keys() == {first.id, second.id}, "the login is gone with its command"
        end(lab, first, second)
        settled(lab)


@pytest.mark.promise("cluster.login")
def test_a_shell_on_a_terminal_is_in_the_cluster(lab: Lab) -> None:
    with cancelled(lab):
        first = member(lab, "n1")
        keys = "tty; echo knows $(grep -c . $WCOLL) of $VHPC_CLUSTER_NAME; exit 5\n"
        words = ("script", "-qec", " ".join(LOGIN), "/dev/null")
        said = lab.run("login", *words, user="alice", stdin=keys, timeout=400, check=False)
        assert said.code == 5, said
        assert "/dev/pts/" in said.out
        assert "knows 2 of alpha" in said.out
        end(lab, first)
        settled(lab)


def test_mistakes_of_a_login_make_no_job(lab: Lab) -> None:
    newest = "sacct -nX -a -o JobID | tail -n1"
    before = lab.run("ctl", "sh", "-c", newest).out
    lab.run("login", "vhpc", "cluster", "create", "alpha", user="alice")
    try:
        for words, said in (
            (
                (*LOGIN, "--partition=nosuch", "--", "true"),
                "vhpc: there is no partition 'nosuch' (use another",
            ),
            ((*LOGIN,), "vhpc: a shell needs a terminal (give a command"),
            (
                (*LOGIN[:-1], "beta", "--", "true"),
                "vhpc: there is no cluster 'beta': a login joins a cluster",
            ),
        ):
            done = lab.run("login", *words, user="alice", check=False)
            assert (done.code, done.out) == (1, "")
            assert done.err.startswith(said), done
    finally:
        lab.run("login", "vhpc", "cluster", "rm", "alpha", user="alice")
    assert lab.run("ctl", "sh", "-c", newest).out == before


@pytest.fixture(scope="module")
def hpc() -> str:
    publish(HPC)
    return HPC


@pytest.fixture
def pair(lab: Lab, hpc: str) -> Iterator[tuple[Job, Job]]:
    """Two members with MPI and ssh; their scripts need no Python of the image."""
    with cancelled(lab):
        found = [member(lab, node, "--mem=900", f"--vhpc-image={hpc}") for node in ("n1", "n2")]
        yield found[0], found[1]
        end(lab, *found)


@pytest.mark.slow
@pytest.mark.timeout(3900)
@pytest.mark.promise("cluster.login")
def test_mpirun_and_ssh_reach_all_guests(lab: Lab, pair: tuple[Job, Job]) -> None:
    program = (
        "for name in $(cat $WCOLL); do ssh -n $name 'echo ssh $(hostname)'; done\n"
        "mpirun.openmpi -n 3 sh -c 'echo openmpi $(hostname)'\n"
        "mpirun.mpich -n 3 sh -c 'echo mpich $(hostname)'\n"
        f'mpirun.openmpi -n 3 python3 -c "{SUM}"\n'
    )
    options = ("--image", HPC, "--srun=--mem=900", "--srun=-wn2")
    said = login(lab, *options, "--", "sh", "-c", program)
    assert said.code == 0, said
    found = Counter(said.out.splitlines())
    for kind in ("ssh", "openmpi", "mpich"):
        assert (found[f"{kind} n1"], found[f"{kind} n2"]) == (1, 2), said
    assert found["sum 6"] == 3, said
