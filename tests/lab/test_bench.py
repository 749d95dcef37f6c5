# SPDX-License-Identifier: Apache-2.0
"""vhpc bench on the lab. Its guests are emulated: tests check that there are figures, not their values."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import hpc_codes
import pytest
from cluster import EXEC, IMAGE, Done, Lab, publish

pytestmark = pytest.mark.lab

SMALL = (
    "--size=triad-mib=1",
    "--size=triad-rounds=2",
    "--size=files-mib=1",
    "--size=files-count=5",
    "--size=mpi-count=5",
    "--size=lj-side=5",
    "--size=lj-steps=10",
    "--size=hpcc-mib=1",
)
FIGURES = {"triad": 1, "files": 6}


def _bench(lab: Lab, *words: str, **others: Any) -> Done:
    return lab.run("login", "vhpc", "bench", *words, user="alice", check=False, **others)


def _left(lab: Lab) -> list[str]:
    return lab.run("login", "sh", "-c", "ls -d vhpc-bench-* 2>/dev/null || true", user="alice").out.split()


@pytest.fixture(autouse=True)
def _no_folder(lab: Lab) -> Iterator[None]:
    yield
    lab.run("login", "sh", "-c", "rm -rf vhpc-bench-*", user="alice")


@pytest.mark.promise("bench.compare")
def test_a_node_and_its_guest_are_compared(lab: Lab) -> None:
    words = ("--image", IMAGE, "--tests=triad,files", "--rounds=1", "--time=5", "--svg=bench.svg", "--json")
    done = _bench(lab, "node", *words, *SMALL)
    assert done.code == 0, done
    found = json.loads(done.out)
    assert {one["test"]: len(one["metrics"]) for one in found["tests"]} == FIGURES
    for one in found["tests"]:
        assert (one["status"], one["problems"]) == ("measured", [])
        for metric in one["metrics"]:
            (native,), (guest,) = metric["native"], metric["guest"]
            assert min(native, guest) > 0
            assert metric["efficiency"] == pytest.approx(guest / native)  # all of these are rates
    kernel = lab.run("login", "uname", "-r").out.strip()
    assert found["machines"]["native"]["kernel"] == kernel != found["machines"]["guest"]["kernel"]
    assert found["emulated"]
    assert any("emulated (QEMU without KVM)" in warning for warning in found["warnings"])
    assert "round 1 of 1, guest: job " in done.err
    assert lab.read("alice", "bench.svg").startswith("<svg")
    assert _left(lab) == []


def test_mistakes_are_one_line_and_leave_no_job(lab: Lab) -> None:
    for words, says in (
        (("node", "--image", "debain-minimal"), "did you mean debian-minimal"),
        (("job", "--image", IMAGE, "--sbatch=--partition=none"), "Slurm refused the job"),
        (("node", "--image", IMAGE, "--sbatch=--partition=none"), "Slurm refused the job"),
        (("node", "--image", IMAGE, "--tests=traid"), "did you mean triad"),
        (("node", "--image", IMAGE, "--dir=/proc"), "cannot create a folder in /proc"),
    ):
        done = _bench(lab, *words)
        assert (done.code, done.out) == (1, ""), done
        assert says in done.err
        assert done.err.count("\n") == 1
    assert lab.run("ctl", "squeue", "-h", "-o", "%i").out == ""
    assert _left(lab) == []


@pytest.mark.promise("bench.compare")
def test_control_c_cancels_the_running_job(lab: Lab) -> None:
    """While it waits in the queue for a node that another job has."""
    holder = lab.submit("sleep 300", "-N2", "--exclusive", image=None)
    holder.wait("RUNNING")
    words = ("vhpc", "bench", "node", "--image", IMAGE, "--tests=triad", *SMALL)
    with subprocess.Popen([*EXEC, "-u", "alice", "login", "--", *words], stderr=subprocess.PIPE) as bench:
        assert bench.stderr is not None
        told = ""
        while " pending (" not in told:
            line = bench.stderr.readline().decode()
            assert line, told
            told += line
        bench.send_signal(signal.SIGINT)  # vlab passes it on
        told += bench.stderr.read().decode()
    assert bench.returncode == 130, told
    assert "native: job " in told
    assert " is cancelled\n" in told
    queue = lab.run("ctl", "squeue", "-h", "-o", "%i").out.split()
    assert queue == [str(holder.id)]
    assert len(_left(lab)) == 1


@pytest.mark.promise("bench.compare")
@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_all_tests_of_a_job_run_in_guests(lab: Lab) -> None:
    """The nodes of the lab have no MPI: the report shows it, and the guests' outputs are complete."""
    publish("debian-hpc")
    words = ("--ntasks-per-node=1", "--rounds=1", "--time=30", "--keep", "--json")
    done = _bench(lab, "job", *words, *SMALL, timeout=2000)
    found = json.loads(done.out)
    statuses = {one["test"]: one["status"] for one in found["tests"]}
    assert statuses == {
        "files": "measured",
        "pingpong": "missing",
        "allreduce": "missing",
        "lammps": "missing",
        "hpcc": "missing",
    }, found
    for one in found["tests"][1:]:
        (problem,) = one["problems"]
        assert problem.startswith("natively: "), one
        assert "install it on the nodes (Debian: " in problem
    assert done.code == 0  # no test was named
    guest = f"{found['folder']}/round1-guest"
    status = lab.run("login", "sh", "-c", f"cat {guest}/*.status").out.split()
    assert status == ["0"] * 6  # machine and five tests
    assert "\nranks 2\n" in lab.run("login", "cat", f"{guest}/pingpong.out").out
    assert "on 2 procs for 10 steps with 500 atoms" in lab.run("login", "cat", f"{guest}/lammps.out").out
    assert "\nSuccess=1\n" in lab.run("login", "cat", f"{guest}/hpcc.out").out


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_all_tests_of_a_job_are_compared(lab: Lab) -> None:
    """The nodes use the programs of the image, unpacked in a shared folder."""
    publish("debian-hpc")
    hpc_codes.unpack("debian-hpc")
    try:
        words = ("--ntasks-per-node=1", "--rounds=1", "--time=30", "--json")
        done = _bench(lab, "job", *words, f"--native-setup={hpc_codes.NATIVE}", *SMALL, timeout=2000)
    finally:
        hpc_codes.remove()
    assert done.code == 0, done
    tests = {one["test"]: one for one in json.loads(done.out)["tests"]}
    assert sorted(tests) == ["allreduce", "files", "hpcc", "lammps", "pingpong"]
    for one in tests.values():
        assert (one["status"], one["problems"]) == ("measured", []), one
        for metric in one["metrics"]:
            (native,), (guest,) = metric["native"], metric["guest"]
            assert min(native, guest) > 0, metric
    assert _left(lab) == []
