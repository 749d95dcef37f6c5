# SPDX-License-Identifier: Apache-2.0
"""PMI of Slurm's own plugins in guests: what programs exchange, and what is refused."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from cluster import Lab, without_retries
from pmi_client import CLIENT

pytestmark = pytest.mark.lab

NETWORK = "--vhpc-network=job"
PAIR = ("-N2", "--ntasks-per-node=2")
EIGHT = "srun -O --ntasks-per-node=4 --mpi=pmi2 -n8 python3 ~/client.py"

# As MPICH begins on PMI_FD (PMI-1), and as a PMIx client finds its server.
USE_PMI = """
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


def _types(lab: Lab) -> list[str]:
    """Which of Slurm's plugins that give PMI are there: Debian 12's pmix lacks its library."""
    runs = [lab.run("login", "srun", f"--mpi={name}", "true", check=False) for name in ("pmi2", "pmix")]
    return [name for name, run in zip(("pmi2", "pmix"), runs, strict=True) if run.code == 0]


def _script(program: str, *lines: str) -> str:
    """A script with a program at ~/client.py; each line gets a heading, and its exit code follows."""
    said = "".join(f"echo '== {line.split()[0]}'; {line.split(' ', 1)[1]}; echo exit $?\n" for line in lines)
    return f"cat > ~/client.py <<'END'\n{program}\nEND\n{{\n{said}}} 2>&1\n"


def _parts(text: str) -> dict[str, list[str]]:
    parts = without_retries(text).split("== ")[1:]
    return {part.split("\n", 1)[0]: part.splitlines()[1:] for part in parts}


@pytest.mark.promise("pmi.exchange")
def test_tasks_of_all_nodes_exchange_values_by_pmi(lab: Lab) -> None:
    # cyclic: tasks 0, 2, 4 and 6 are on the first node
    lines = (f"one {EIGHT} 1", f"cyclic {EIGHT.replace('srun', 'srun -m cyclic')} 2")
    job = lab.finish(_script(CLIENT, *lines), *PAIR, NETWORK)
    output = lab.read(job.user, f"slurm-{job.id}.out")
    emulated = lab.run("n1", "test", "-w", "/dev/kvm", check=False).code != 0
    assert output.count("vhpc: the guests are emulated") == emulated, "once, and only then"
    parts = _parts(output)
    for name in ("one", "cyclic"):
        hosts = "hosts" + (4 * " n1" + 4 * " n2" if name != "cyclic" else 4 * " n1 n2")
        found = Counter(line for line in parts[name] if not line.startswith("mapping"))
        assert found == {hosts: 8, "end b''": 8, "exit 0": 1}, parts[name]
    assert Counter(parts["one"])["mapping (vector,(0,2,4))"] == 8


@pytest.mark.promise("pmi.exchange")
def test_a_guest_is_a_node_of_the_process_mapping(lab: Lab) -> None:
    lines = (f"one {EIGHT} 1", f"cyclic {EIGHT.replace('srun', 'srun -m cyclic')} 2")
    options = (*PAIR, NETWORK, "--vhpc-guests-per-node=2", "--mem=1400")
    parts = _parts(lab.finish(_script(CLIENT, *lines), *options).output())
    assert Counter(parts["one"]) == {
        "mapping (vector,(0,4,2))": 8,
        "hosts n1-g0 n1-g0 n1-g1 n1-g1 n2-g0 n2-g0 n2-g1 n2-g1": 8,
        "end b''": 8,
        "exit 0": 1,
    }
    # tasks 0 and 2 are in the first guest of the first node, 1 and 3 in the first one of the second
    blocks = "(0,1,1),(2,1,1),(0,1,1),(2,1,1),(1,1,1),(3,1,1),(1,1,1),(3,1,1)"
    assert Counter(parts["cyclic"]) == {
        f"mapping (vector,{blocks})": 8,
        "hosts n1-g0 n2-g0 n1-g0 n2-g0 n1-g1 n2-g1 n1-g1 n2-g1": 8,
        "end b''": 8,
        "exit 0": 1,
    }


def test_a_guest_needs_no_network_for_its_own_tasks(lab: Lab) -> None:
    lines = ("tasks srun --mpi=pmi2 -n2 python3 ~/client.py 1",)
    parts = _parts(lab.finish(_script(CLIENT, *lines), "-N1", "-n2", "-w", "n1").output())
    assert Counter(parts["tasks"]) == {
        "mapping (vector,(0,1,2))": 2,
        "hosts n1 n1": 2,
        "end b''": 2,
        "exit 0": 1,
    }


@pytest.mark.promise("pmi.refuse")
def test_pmi_without_network_is_refused_and_others_run(lab: Lab) -> None:
    """As with MpiDefault, where every step has the variables, whatever its program is."""
    types = _types(lab)
    assert "pmi2" in types
    lines = [
        line.replace("TYPE", name)
        for name in types
        for line in (
            "TYPE-hostname srun --mpi=TYPE -n4 hostname",
            "TYPE-variables srun --mpi=TYPE -n2 sh -c 'env | grep -c \"^PMI\"'",
            "TYPE-client srun --mpi=TYPE -n4 -l python3 ~/client.py",
            "TYPE-single srun --mpi=TYPE -N1 -n1 python3 ~/client.py",
            "TYPE-singletons VHPC_PMI=singleton srun --mpi=TYPE -n2 python3 ~/client.py",
        )
    ]
    job = lab.finish(_script(USE_PMI, *lines), *PAIR)
    said = _parts(job.output())
    for name in types:
        assert sorted(said[f"{name}-hostname"]) == ["exit 0", "n1", "n1", "n2", "n2"]
        *counts, end = said[f"{name}-variables"]
        assert end == "exit 0"
        assert all(int(count) > 2 for count in counts), counts
        client = "\n".join(said[f"{name}-client"])
        assert len(re.findall(r"^\d: before$", client, re.M)) == 4
        assert "after" not in client
        refusals = re.findall(r"^\d: vhpc: (step .*)$", client, re.M)
        assert len(refusals) == 2, client  # one for each guest
        for line in refusals:
            assert f"--mpi={name}" in line
            assert "submit the job with --vhpc-network=job" in line
            assert "VHPC_PMI=singleton" in line
        assert client.splitlines()[-1] == "exit 126"
        assert said[f"{name}-single"] == ["before", "after []", "exit 0"]
        assert sorted(said[f"{name}-singletons"]) == ["after []", "after []", "before", "before", "exit 0"]
