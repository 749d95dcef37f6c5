# SPDX-License-Identifier: Apache-2.0
"""vhpc image warm with images.peer_port: nodes pass an image on without a job that has all of them.

Nodes are network namespaces on one switch, with a store each; credentials are munge's, and all programs
are vhpc's own. sinfo and srun are scripts; tests/lab/test_image_warm.py runs Slurm's.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import site_catalog
from controller_lab import HAVE_MUNGED, munged
from network_lab import Host, inside, ip, usable

from pace import limit
from vhpc_slurm.cli import context
from vhpc_slurm.cli.main import main

PYTHON = Path(__file__).parents[4] / "python"
CHUNK = 1 << 16
NODES = ("11", "12", "13", "14", "15")
RUN = "warm-" + "0" * 32
SRUN = """#!/bin/sh
cd {folder}
for word; do case $word in --nodelist=*) node=${{word#*=}};; esac; done
echo "$*" >asked.$node
while [ "$1" != vhpc ]; do shift; done
shift
[ ! -e $node.sh ] || exec /bin/sh $node.sh
exec ip netns exec {spaces}$node env VHPC_CONFIG={folder}/$node.toml PYTHONPATH={python} \\
    {executable} -m vhpc_slurm.cli.main "$@"
"""
reason = usable() or ("" if HAVE_MUNGED else "needs munged: apt install munge")
needs_nodes = pytest.mark.skipif(bool(reason), reason=reason)


class Site:
    """Five nodes, a login host in the test's own network, and an image with a chunk list."""

    def __init__(self, folder: Path, socket: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.socket, self._capsys = folder, socket, capsys
        root = random.Random(1).randbytes(40 * CHUNK + 1000)
        self.root = hashlib.sha256(root).hexdigest()
        hashes = b"".join(hashlib.sha256(root[at : at + CHUNK]).digest() for at in range(0, len(root), CHUNK))
        chunks = hashlib.sha256(hashes).hexdigest()
        self.digest = site_catalog.publish(
            folder / "catalog", "base", root, chunks={"sha256": chunks, "size": CHUNK}
        )
        (folder / "catalog/blobs/sha256" / chunks).write_bytes(hashes)
        self.size = len(b"kernel") + len(b"initrd") + len(root) + len(hashes)
        for name in ("vhpc", *NODES):
            self.configure(name)
        lines = "\n".join(f"{node}|idle|up|main*" for node in NODES)
        self.script("sinfo", f"#!/bin/sh\ncat <<'EOF'\n{lines}\nEOF\n")
        self.spaces = f"vhpct{os.getpid()}"
        self.script(
            "srun",
            SRUN.format(folder=folder, spaces=self.spaces, python=PYTHON, executable=sys.executable),
        )

    def configure(self, node: str, catalog: str = "catalog", port: int = 812) -> None:
        (self.folder / f"{node}.toml").write_text(
            f'[images]\ncatalog = "{self.folder}/{catalog}"\nstore = "{self.folder}/{node}/store"\n'
            f'peer_port = {port}\npeer_names = "192.0.2.{{node}}"\n'
            f'[controller]\nslurm_bin = "{self.folder}"\nmunge_socket = "{self.socket}"\n'
            f'[paths]\nrun = "{self.folder}/{node}/run"\nlog = "{self.folder}/{node}/log"\n'
        )

    def script(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)
        (self.folder / name).chmod(0o755)

    def blob(self, node: str, sha256: str) -> Path:
        return self.folder / node / "store/blobs/sha256" / sha256

    def is_whole(self, node: str) -> bool:
        found = list((self.folder / node / "store/blobs/sha256").glob("[0-9a-f]*"))
        return len(found) == 4 and all(
            hashlib.sha256(path.read_bytes()).hexdigest() == path.name for path in found
        )

    def warm(self, *options: str, code: int = 0) -> dict[str, Any]:
        """Of each node, what the command prints of it."""
        assert main(("image", "warm", "base", "-w", "[11-15]", "--json", *options)) == code
        done = self._capsys.readouterr()
        self.error = done.err
        return {one["node"]: one for one in json.loads(done.out)["nodes"]}

    def processes(self) -> list[Path]:
        """Processes on nodes: those in their network namespaces."""
        own = {Path(f"/run/netns/{self.spaces}{node}").stat().st_ino for node in NODES}
        found = []
        for path in Path("/proc").glob("[0-9]*/ns/net"):
            with contextlib.suppress(OSError):
                if path.stat().st_ino in own:
                    found.append(path.parents[1])
        return found

    def servers(self) -> list[Path]:
        return [
            path for path in self.processes() if b"store.peers.process" in (path / "cmdline").read_bytes()
        ]

    def server(self) -> Path:
        """The only one; while a program is being executed, its process has no arguments for a moment."""
        until(lambda: len(self.servers()) == 1)
        return self.servers()[0]

    def left(self) -> list[str]:
        """Processes on nodes, and offers."""
        offers = self.folder.glob("*/run/warming/*")
        return [str(path) for path in (*self.processes(), *offers)]


@pytest.fixture
def site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Site]:
    monkeypatch.setenv("VHPC_CONFIG", str(tmp_path / "vhpc.toml"))
    monkeypatch.setattr(context, "is_root", lambda: True)
    with munged() as daemon, contextlib.ExitStack() as hosts:
        switch = Host("sw", "")
        hosts.callback(switch.close)
        with inside(switch.namespace):
            ip("link", "add", "switch", "type", "bridge")
            ip("link", "set", "switch", "up")
        for node in NODES:
            host = Host(node, f"192.0.2.{node}")
            hosts.callback(host.close)
            host.plug(switch)
        found = Site(tmp_path, daemon.socket, capsys)
        yield found


def until(what: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + limit(seconds)
    while not what():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.promise("peers.warm")
@needs_nodes
def test_a_warming_reads_the_catalogue_once(site: Site) -> None:
    nodes = site.warm()
    assert [node for node in NODES if site.is_whole(node)] == list(NODES)
    assert [one["copied"] for one in nodes.values()] == [site.size] * 5
    read = {node: one["sources"].get("catalogue", 0) for node, one in nodes.items()}
    assert sorted(read.values()) == [0, 0, 0, 0, site.size]
    assert all(sum(one["sources"].values()) == site.size for one in nodes.values())
    assert site.left() == []
    again = site.warm()
    assert [(one["copied"], one["sources"]) for one in again.values()] == [(0, {})] * 5


@pytest.mark.promise("peers.warm")
@needs_nodes
def test_one_node_after_another_needs_one_catalogue(site: Site) -> None:
    """The catalogue of the others has names and manifests, and no files of images."""
    subprocess.run(
        ["sh", "-ec", "mkdir names-only; cp -r catalog/names catalog/manifests names-only"],
        cwd=site.folder,
        check=True,
    )
    for node in NODES[1:]:
        site.configure(node, "names-only")
    nodes = site.warm("--parallel=1")
    assert nodes["11"]["sources"] == {"catalogue": site.size}
    for before, node in itertools.pairwise(NODES):
        assert nodes[node]["sources"] == {before: site.size}
        assert site.is_whole(node)
    assert site.left() == []


@pytest.mark.promise("peers.warm")
@needs_nodes
def test_a_node_that_claims_to_serve_fails_no_other(site: Site) -> None:
    """11 joins first and copies nothing until 12 has all; the others give it up."""
    (site.folder / "11.sh").write_text(
        "read begin; echo '{\"serves\":true}'; read sources; touch joined\n"
        f"while [ ! -e {site.blob('12', site.root)} ]; do sleep 0.1; done\n"
        "echo 'vhpc: this node is broken' >&2; exit 1\n"
    )
    for node in NODES[1:]:
        real = (site.folder / "srun").read_text().splitlines()[-2:]
        (site.folder / f"{node}.sh").write_text(
            f"node={node}\nwhile [ ! -e joined ]; do sleep 0.1; done\n"
            + "\n".join(real).replace('"$@"', f"image stage base@{site.digest} --json --peers\n")
        )
    nodes = site.warm(code=1)
    assert nodes["11"]["problem"] == "this node is broken"
    assert [node for node in NODES if site.is_whole(node)] == list(NODES[1:])
    read = [one["sources"].get("catalogue") for one in nodes.values()]
    assert site.size in read, "the first that asked 11"
    assert site.left() == []


@needs_nodes
def test_a_node_without_a_port_is_warmed_and_not_asked(site: Site) -> None:
    site.configure("11", port=0)
    nodes = site.warm("--parallel=1")
    assert nodes["11"]["sources"] == nodes["12"]["sources"] == {"catalogue": site.size}
    assert nodes["13"]["sources"] == {"12": site.size}


@needs_nodes
def test_without_a_port_each_node_reads_the_catalogue(site: Site) -> None:
    site.configure("vhpc", port=0)
    nodes = site.warm()
    assert [one["sources"] for one in nodes.values()] == [{"catalogue": site.size}] * 5
    assert "--input=none" in (site.folder / "asked.11").read_text()


@pytest.mark.promise("peers.warm")
@needs_nodes
def test_ctrl_c_ends_nodes_that_serve(site: Site) -> None:
    """12 has the image and serves those that come; 11 does not come."""
    (site.folder / "11.sh").write_text("exec sleep 600\n")
    code = (
        "import signal, sys\nfrom vhpc_slurm.cli import main\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # background shells ignore it
        "sys.exit(main.main())"
    )
    command = subprocess.Popen(
        [sys.executable, "-c", code, "image", "warm", "base", "-w", "[11-12]"],
        env={**os.environ, "PYTHONPATH": str(PYTHON)},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert command.stderr is not None
    assert command.stderr.readline() == "vhpc: 1 of 2 nodes done\n"
    assert site.is_whole("12")
    assert len(site.servers()) == 1
    command.send_signal(signal.SIGINT)
    _, said = command.communicate(timeout=30)
    assert (command.returncode, said) == (130, "")
    assert site.left() == []


# --- the part of one node -----------------------------------------------------


class Node:
    """``vhpc image stage --peers`` on 11; the test is vhpc image warm."""

    def __init__(self, site: Site) -> None:
        with inside(f"{site.spaces}11"):
            self.command = subprocess.Popen(
                [sys.executable, "-m", "vhpc_slurm.cli.main", "image", "stage", "base", "--peers", "--json"],
                env={**os.environ, "PYTHONPATH": str(PYTHON), "VHPC_CONFIG": str(site.folder / "11.toml")},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )

    def say(self, line: str) -> None:
        assert self.command.stdin is not None
        self.command.stdin.write(line + "\n")
        self.command.stdin.flush()

    def hear(self) -> Any:
        assert self.command.stdout is not None
        return json.loads(self.command.stdout.readline())

    def end(self) -> tuple[int, str]:
        """Exit status and standard error, after standard input has ended."""
        _, said = self.command.communicate(timeout=60)
        return self.command.returncode, said


@pytest.fixture
def node(site: Site) -> Iterator[Node]:
    found = Node(site)
    yield found
    found.command.kill()
    found.command.wait()


BEGIN = json.dumps({"run": RUN, "node": "11", "nodes": "[11-12]"})


@needs_nodes
def test_a_node_serves_without_rights_until_its_input_ends(site: Site, node: Node) -> None:
    node.say(BEGIN)
    assert node.hear() == {"serves": True}
    server = site.server()
    # its rights are gone once setpriv has executed it, a moment after it has been started
    until(lambda: "Name:\tsetpriv\n" not in (server / "status").read_text())
    assert "CapEff:\t0000000000000000" in (server / "status").read_text()
    offer = json.loads((site.folder / f"11/run/warming/{RUN}.json").read_text())
    assert (offer["node"], offer["nodes"], offer["owner"]) == ("11", ["11", "12"], None)
    node.say('{"sources": []}')
    done = node.hear()
    assert (done["copied"], done["digest"]) == (site.size, site.digest)
    time.sleep(0.5)
    assert node.command.poll() is None
    assert node.end() == (0, "")
    assert site.left() == []


@pytest.mark.promise("peers.warm")
@needs_nodes
@pytest.mark.parametrize("how", ["its input ends", "it is told to end"])
def test_a_node_that_ends_early_leaves_nothing(site: Site, node: Node, how: str) -> None:
    node.say(BEGIN)
    node.hear()
    if how == "it is told to end":
        node.command.send_signal(signal.SIGTERM)
        until(lambda: node.command.poll() is not None)
        assert node.command.returncode == 128 + signal.SIGTERM
    else:
        code, said = node.end()
        assert (code, said) == (4, "vhpc: vhpc image warm has ended, or says nothing\n")
    assert site.left() == []


@needs_nodes
def test_an_offer_of_a_killed_command_is_not_valid_and_goes(site: Site, node: Node) -> None:
    node.say(BEGIN)
    node.hear()
    node.command.kill()
    node.command.wait()
    server = site.server()
    os.kill(int(server.name), signal.SIGKILL)
    assert (site.folder / f"11/run/warming/{RUN}.json").exists()
    other = Node(site)
    other.say(BEGIN.replace(RUN, "warm-" + "1" * 32))
    assert other.hear() == {"serves": True}
    other.end()
    assert site.left() == []


@needs_nodes
@pytest.mark.parametrize(
    "line",
    [
        "no JSON",
        "[]",
        BEGIN.replace("warm-", "../../warm-"),
        BEGIN.replace(RUN, RUN + "\\n"),
        BEGIN.replace(RUN, "7.0.0123abcd"),
        BEGIN.replace("[11-12]", "[11-"),
        "{}" + " " * 70000,
    ],
    ids=["text", "list", "path", "line feed", "generation", "nodes", "long"],
)
def test_other_input_is_refused_with_one_line(site: Site, node: Node, line: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        node.say(line)
    code, said = node.end()
    assert code == 1
    assert said.startswith("vhpc: standard input is not that of vhpc image warm")
    assert said.count("\n") == 1
    assert not (site.folder / "11/run").exists()
