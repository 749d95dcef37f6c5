# SPDX-License-Identifier: Apache-2.0
"""Nodes of a job ask each other for the image: the catalogue is read once, and nothing stays behind."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from cluster import IMAGE, NODES, Lab
from image_files import BLOBS, CATALOG, files, forget, peer_port, sources
from injection import in_boot

pytestmark = pytest.mark.lab


@pytest.fixture(scope="module", autouse=True)
def port(lab: Lab) -> Iterator[None]:
    """Both nodes have images.peer_port, and the host of vhpc image warm."""
    with peer_port(lab, (*NODES, "login")):
        yield


def serving(lab: Lab, node: str) -> str:
    return lab.run(node, "pgrep", "-f", "store.peers.process", check=False).out


@pytest.mark.promise("peers.job", "peers.process")
def test_two_cold_nodes_read_the_catalogue_once(lab: Lab) -> None:
    names = files(lab)
    for node in NODES:
        forget(lab, node, names)
    job = lab.finish("srun hostname", "-N2")
    assert sorted(job.output().split()) == list(NODES)
    size, found = sum(names.values()), sources(lab, job.id)
    assert found["n1"] == {"catalogue": size}
    assert found["n2"] == {"n1": size}
    for node in NODES:
        sums = lab.run(node, "sha256sum", *(f"{BLOBS}/{name}" for name in names)).out
        assert [line.split()[0] for line in sums.splitlines()] == list(names)
    lab.quiet()
    assert [serving(lab, node) for node in NODES] == ["", ""]
    lab.assert_clean()


def test_a_node_that_has_the_image_gives_it_to_another(lab: Lab) -> None:
    names = files(lab)
    lab.run("n1", "vhpc", "image", "stage", IMAGE)
    forget(lab, "n2", names)
    job = lab.finish("srun hostname", "-N2")
    assert set(sources(lab, job.id)["n2"]) == {"n1"}
    lab.quiet()


@pytest.mark.promise("peers.warm")
def test_two_nodes_are_warmed_from_one_reading(lab: Lab) -> None:
    names = files(lab)
    for node in NODES:
        forget(lab, node, names)
    done = lab.run("login", "vhpc", "image", "warm", IMAGE, "-w", "n[1-2]", "--json", timeout=600)
    size, nodes = sum(names.values()), json.loads(done.out)["nodes"]
    assert [one["problem"] for one in nodes] == ["", ""], done.err
    assert sorted(one["sources"].get("catalogue", 0) for one in nodes) == [0, size]
    for node in NODES:
        sums = lab.run(node, "sha256sum", *(f"{BLOBS}/{name}" for name in names)).out
        assert [line.split()[0] for line in sums.splitlines()] == list(names)
    lab.quiet()
    assert [serving(lab, node) for node in NODES] == ["", ""]
    lab.assert_clean()


def test_an_interrupted_copy_continues(lab: Lab) -> None:
    """As a kill -9 leaves it: half of the root, and some bytes more."""
    names = files(lab)
    forget(lab, "n1", names)
    root = max(names, key=lambda name: names[name])
    part = f"{BLOBS}/.{root}.part"
    lab.run("n1", "sh", "-ec", f"head -c {names[root] // 2 + 777} {CATALOG}/blobs/sha256/{root} >{part}")
    job = lab.finish("true", "-w", "n1")
    found = sources(lab, job.id)["n1"]
    assert found["kept"] > names[root] // 3
    assert sum(found.values()) == sum(names.values())
    assert lab.run("n1", "sha256sum", f"{BLOBS}/{root}").out.split()[0] == root
    lab.quiet()


def test_a_server_killed_in_a_copy_costs_only_time(lab: Lab) -> None:
    """n2 has the rest of the image from the catalogue."""
    names = files(lab)
    lab.run("n1", "vhpc", "image", "stage", IMAGE)
    forget(lab, "n2", names)
    job = lab.submit("srun hostname", "-N2")
    server = "'[s]tore.peers.process'"  # not the shell whose command has this word
    act = f"pkill -STOP -f {server} && sleep 2 && pkill -KILL -f {server}"
    in_boot(lab, job, "n1", act, sign=f"pgrep -f {server} >/dev/null")
    assert job.wait() == "COMPLETED"
    assert sorted(job.output().split()) == list(NODES)
    found = sources(lab, job.id)["n2"]
    assert sum(found.values()) == sum(names.values())
    assert found.get("catalogue", 0) > 0, found
    sums = lab.run("n2", "sha256sum", *(f"{BLOBS}/{name}" for name in names)).out
    assert [line.split()[0] for line in sums.splitlines()] == list(names)
    lab.quiet()
