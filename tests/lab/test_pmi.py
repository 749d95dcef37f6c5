# SPDX-License-Identifier: Apache-2.0
"""Steps of several tasks whose tasks have PMI, which is not relayed into guests."""

from __future__ import annotations

import re
import subprocess

import pytest
from cluster import ROOT, Lab, without_retries

pytestmark = pytest.mark.lab

# As MPICH begins on PMI_FD (PMI-1), and as a PMIx client finds its server.
CLIENT = """
import os, socket, time
print("before", flush=True)
if "PMI_FD" in os.environ:
    os.write(int(os.environ["PMI_FD"]), b"cmd=init pmi_version=1 pmi_subversion=1\\n")
    time.sleep(60)
for name in sorted(os.environ):
    if name.startswith("PMIX_SERVER_URI"):
        port = int(os.environ[name].rpartition(":")[2])
        socket.create_connection(("127.0.0.1", port)).recv(1)
        time.sleep(60)
print("after", sorted(name for name in os.environ if name.startswith("PMI")), flush=True)
"""
JOB = """
cat > ~/client.py <<'END'
{client}
END
for type in {types}; do
    said() {{ echo "== $type $1"; shift; srun --mpi=$type "$@"; echo "exit $?"; }}
    said hostname -n4 hostname
    said variables -n2 sh -c 'env | grep -c "^PMI"'
    said client -n4 -l python3 ~/client.py
    said single -N1 -n1 python3 ~/client.py
    VHPC_PMI=singleton said singletons -n2 python3 ~/client.py
done 2>&1
"""


def _types(lab: Lab) -> list[str]:
    """Which of Slurm's plugins that give PMI are there: Debian 12's pmix lacks its library."""
    runs = [lab.run("login", "srun", f"--mpi={name}", "true", check=False) for name in ("pmi2", "pmix")]
    return [name for name, run in zip(("pmi2", "pmix"), runs, strict=True) if run.code == 0]


@pytest.mark.timeout(240)
def test_programs_that_use_pmi_are_refused_and_others_run(lab: Lab) -> None:
    """As with MpiDefault, where every step has the variables, whatever its program is."""
    types = _types(lab)
    assert "pmi2" in types
    job = lab.finish(JOB.format(client=CLIENT, types=" ".join(types)), "-N2", "--ntasks-per-node=2", "-O")
    parts = without_retries(job.output()).split("== ")[1:]
    said = {tuple(part.split("\n", 1)[0].split()): part.split("\n", 1)[1] for part in parts}
    for name in types:
        assert sorted(said[name, "hostname"].splitlines()) == ["exit 0", "n1", "n1", "n2", "n2"]
        counts = said[name, "variables"].splitlines()
        assert counts[-1] == "exit 0"
        assert all(int(count) > 2 for count in counts[:-1]), counts
        client = said[name, "client"]
        assert len(re.findall(r"^\d: before$", client, re.M)) == 4
        assert "after" not in client
        lines = re.findall(r"^\d: vhpc: (step .*)$", client, re.M)
        assert len(lines) == 2, client  # one for each guest
        assert all(f"--mpi={name}" in line and "VHPC_PMI=singleton" in line for line in lines)
        assert client.splitlines()[-1] == "exit 126"
        assert said[name, "single"].splitlines() == ["before", "after []", "exit 0"]
        singletons = sorted(said[name, "singletons"].splitlines())
        assert singletons == ["after []", "after []", "before", "before", "exit 0"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_open_mpi_runs_in_one_guest_and_is_refused_across_tasks(lab: Lab) -> None:
    subprocess.run([ROOT / "scripts/publish-image", "debian-openmpi"], check=True, timeout=600)
    rank = "from mpi4py import MPI; c = MPI.COMM_WORLD; print('rank', c.Get_rank(), 'of', c.Get_size())"
    types = " ".join(name for name in _types(lab) if name == "pmix")
    job = lab.finish(
        f"mpirun -np 2 --oversubscribe python3 -c \"{rank}\"\n"
        f"for type in {types}; do\n"
        f"echo == tasks; srun -n2 --mpi=$type python3 -c \"{rank}\" 2>&1; echo exit $?\n"
        f"echo == one; srun -n1 --mpi=$type python3 -c \"{rank}\" 2>&1; echo exit $?\ndone",
        "-N1", "-n2", "--mem=900",
        image="debian-openmpi",
    )  # fmt: skip
    mpirun, *steps = job.output().split("== ")
    assert sorted(mpirun.splitlines()) == ["rank 0 of 2", "rank 1 of 2"]
    if steps:
        tasks, one = steps
        assert not re.findall(r"^rank", tasks, re.M)
        assert tasks.count("vhpc: step") == 1
        assert tasks.splitlines()[-1] == "exit 126"
        assert one.splitlines() == ["one", "rank 0 of 1", "exit 0"]
