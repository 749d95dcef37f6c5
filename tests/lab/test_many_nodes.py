# SPDX-License-Identifier: Apache-2.0
"""Jobs on many nodes: a network of 32 guests, and nodes without the image that read it once."""

from __future__ import annotations

import pytest
from cluster import Lab
from image_files import files, forget, peer_port, sources

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.many_nodes]

NODES, COLD = 16, 8
NEIGHBOURS = """
import os, socket, subprocess
names, here = os.environ["VHPC_NODELIST"].split(","), socket.gethostname()
place = names.index(here)
others = names if place == 0 else [names[0], names[(place + 1) % len(names)]]
for name in others:
    for version in "46":
        ping = ["ping", "-" + version, "-c1", "-W60", "-M", "do", "-s", "1400", name]
        subprocess.run(ping, check=True, stdout=subprocess.DEVNULL)
print("name", here, "reaches", len(others), flush=True)
"""
# ping, when 32 guests share few CPUs and the clock of one was late and is set
CLOCK = "ping: Warning: time of day goes back"


@pytest.fixture(autouse=True)
def _enough_nodes(lab: Lab) -> None:
    if len(lab.nodes) < NODES:
        pytest.fail(f"needs {NODES} nodes; first: lab/vlab down; lab/vlab up --nodes {NODES}", pytrace=False)


@pytest.mark.parametrize(("nodes", "each"), [(16, 2), (8, 4)])
def test_32_guests_are_one_network(lab: Lab, nodes: int, each: int) -> None:
    """The first guest reaches all, each other one the first and its neighbour, by IPv4 and IPv6."""
    cpus = int(lab.run("ctl", "sinfo", "-h", "-n", "n1", "-p", "main", "-o", "%c").out)
    if cpus < each:
        pytest.skip(f"needs a machine with {each} CPUs, one for each guest of a node of the lab")
    lab.run("login", "sh", "-c", "cat > neighbours.py", user="alice", stdin=NEIGHBOURS)
    used = lab.nodes[:nodes]
    job = lab.submit(
        f"echo guests $VHPC_NODELIST\nsrun -n32 --ntasks-per-node={each} python3 ~/neighbours.py",
        f"-N{nodes}",
        f"--nodelist={','.join(used)}",
        f"--ntasks-per-node={each}",
        f"--mem={600 * each}",
        f"--vhpc-guests-per-node={each}",
        "--vhpc-network=job",
        "--vhpc-timeout=180",
    )
    assert job.wait(timeout=1800) == "COMPLETED", job.told()
    names = [f"{node}-g{index}" for node in used for index in range(each)]
    first, *lines = (line for line in job.output().splitlines() if not line.startswith(CLOCK))
    assert first == f"guests {','.join(names)}"
    reached = [f"name {names[0]} reaches 32", *(f"name {name} reaches 2" for name in names[1:])]
    assert sorted(lines) == sorted(reached)


def test_cold_nodes_read_the_catalogue_once(lab: Lab) -> None:
    """Eight nodes without the image read at most one and a half times its bytes from the catalogue."""
    names, nodes = files(lab), lab.nodes[:COLD]
    size = sum(names.values())
    with peer_port(lab, nodes):
        for node in nodes:
            forget(lab, node, names)
        job = lab.submit("srun hostname", f"-N{COLD}", f"--nodelist={','.join(nodes)}", "--vhpc-timeout=180")
        assert job.wait(timeout=1800) == "COMPLETED", job.told()
        assert sorted(job.output().split()) == sorted(nodes)
        found = sources(lab, job.id)
        lab.quiet()
    assert [sum(found[node].values()) for node in nodes] == [size] * COLD
    read = sum(found[node].get("catalogue", 0) for node in nodes)
    print(f"read from the catalogue: {read / size:.2f} times the image's {size} bytes")
    assert read <= 1.5 * size, found
