# SPDX-License-Identifier: Apache-2.0
"""Locks on files of shared folders: programs in several guests, and on hosts, exclude each other."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import VLAB, Lab

pytestmark = pytest.mark.lab

PROGRAM = Path(__file__).with_name("lock_program.py")
ROUNDS = 10
BEGIN = 90  # the counter gets a digit more
# make, add or show: a counter behind a lock file, and a database
WRITER = f"""
import fcntl, sqlite3, sys
from pathlib import Path
own = sqlite3.connect("sqlite", timeout=600, isolation_level=None)
if sys.argv[1] == "make":
    Path("counter").write_text("{BEGIN}")
    own.execute("CREATE TABLE t (n)")
    own.execute("INSERT INTO t VALUES ({BEGIN})")
for _ in range({ROUNDS} if sys.argv[1] == "add" else 0):
    with open("lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        Path("counter").write_text(str(int(Path("counter").read_text()) + 1))
    own.execute("BEGIN IMMEDIATE")
    (found,) = own.execute("SELECT n FROM t").fetchone()
    own.execute("UPDATE t SET n = ?", (found + 1,))
    own.execute("COMMIT")
if sys.argv[1] == "show":
    both = own.execute("SELECT n, (SELECT * FROM pragma_integrity_check) FROM t").fetchone()
    print(Path("counter").read_text(), *both)
"""


@pytest.fixture(scope="module")
def folder(lab: Lab) -> Iterator[str]:
    """The program, in a folder of alice's home."""
    lab.run("login", "mkdir", "-p", "locks", user="alice")
    lab.run("login", "sh", "-c", "cat >locks/program.py", user="alice", stdin=PROGRAM.read_text())
    lab.run("login", "sh", "-c", "cat >locks/writer.py", user="alice", stdin=WRITER)
    yield "/home/alice/locks"
    lab.run("login", "sh", "-c", "rm -rf ~/locks", user="alice")


@pytest.mark.promise("shares.locks")
def test_locks_between_guests_are_as_between_hosts(lab: Lab, folder: str) -> None:
    """Each way to take a lock, and to lose it; the twin has no guests."""
    script = f"own={folder}/$SLURM_JOB_ID; mkdir $own; echo 12345678901234567890 >$own/f\n"
    script += f"srun python3 {folder}/program.py $own"
    jobs = [lab.submit(script, "-N2", "-n2", image=image) for image in ("debian-minimal", None)]
    assert [job.wait() for job in jobs] == ["COMPLETED"] * 2, [job.output() for job in jobs]
    found, expected = (job.output().splitlines() for job in jobs)
    assert len(expected) > 15
    assert found == expected


@pytest.mark.promise("shares.locks")
def test_guests_and_hosts_lose_no_change_of_each_other(lab: Lab, folder: str) -> None:
    """A counter behind flock, and a database of sqlite; one of five writers has no guest."""
    writer = f"python3 {folder}/writer.py"
    job = lab.submit(
        f"set -e; own={folder}/$SLURM_JOB_ID; mkdir $own; cd $own; {writer} make; touch ready\n"
        f"srun {writer} add; until [ -e done ]; do sleep 0.3; done; {writer} show",
        "-N2",
        "--ntasks-per-node=2",
        "--vhpc-guests-per-node=2",
    )
    here = f"until cd {folder}/{job.id}; do sleep 1; done; until [ -e ready ]; do sleep 0.2; done"
    lab.run("login", "sh", "-c", f"{here}; {writer} add; touch done", user="alice", timeout=600)
    assert job.wait(timeout=600) == "COMPLETED", job.output()
    total = BEGIN + 5 * ROUNDS
    assert job.output() == f"{total} {total} ok\n"


@pytest.mark.promise("shares.locks")
def test_a_site_chooses_where_locks_hold(lab: Lab, folder: str) -> None:
    """Nowhere, with an error; or within one guest, which an operator says knowingly."""
    del folder
    script = "cd /scratch; touch own-$SLURM_JOB_ID; srun -l sh -c 'flock -n own-$SLURM_JOB_ID sleep 4;"
    script += " echo $?; flock -n /tmp/own-$SLURM_JOB_ID true; echo $?'; rm own-$SLURM_JOB_ID"
    for key, expected in (
        ("locks_refuse", ["0: 0", "0: 71", "1: 0", "1: 71"]),
        ("locks_guest", ["0: 0", "0: 0", "1: 0", "1: 0"]),
    ):
        setting = rf"/^\[shares\]/a {key} = [\"/scratch\"]"
        for host in ("ctl", "n1", "n2"):
            lab.run(host, "sh", "-c", f'sed -i "{setting}" /etc/vhpc/vhpc.toml')
        lab.service("ctl", "restart", "vhpcd")
        try:
            job = lab.finish(script, "-N2", "-n2")
        finally:
            subprocess.run([VLAB, "up"], check=True, capture_output=True, timeout=120)
        lines = sorted(re.findall(r"^\d: \d+$", job.output(), re.M))
        assert lines == expected, job.output()
        if key == "locks_refuse":
            assert "No locks available" in job.output()
