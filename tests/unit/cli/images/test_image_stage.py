# SPDX-License-Identifier: Apache-2.0
"""vhpc image stage and warm: nodes have an image before a job needs it.

Catalogue and stores are folders. sinfo and srun are scripts; this srun runs the command with the
configuration of "its" node. The lines of sinfo and srun were written for these tests, not captured;
tests/lab/test_image_warm.py runs Slurm's own commands.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import site_catalog
from node_rig import GENERATION, node_layout
from node_rig import publish as publish_image
from peers_rig import finish
from stepd import needs_root

from pace import limit
from vhpc_slurm.catalog import FolderCatalog
from vhpc_slurm.cli import context
from vhpc_slurm.cli.main import main
from vhpc_slurm.errors import FabricError
from vhpc_slurm.model import Blob, ImageIdentity, ImageRef
from vhpc_slurm.node.store import copying as blob_copy
from vhpc_slurm.node.store import images, part, pins
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.slurm import noderuns
from vhpc_slurm.slurm.noderuns import NodeRuns, Place

PYTHON = Path(__file__).parents[4] / "python"
ROOT = b"the root of an image" * 1000
BYTES = len(b"kernel") + len(b"initrd") + len(ROOT)
SINFO = "n1|idle|up|spare\nn1|idle|up|main*\nn2|mixed|down|main*\nn2|mixed|up|spare\nn3|drained*|up|main*\n"
SRUN = """#!/bin/sh
cd {folder}
for word; do case $word in --nodelist=*) node=${{word#*=}};; esac; done
echo "$*" >asked.$node
env >environment.$node
while [ "$1" != vhpc ]; do shift; done
shift
[ ! -e $node.sh ] || exec /bin/sh $node.sh
VHPC_CONFIG={folder}/$node.toml PYTHONPATH={python} exec {executable} -m vhpc_slurm.cli.main "$@"
"""

layout = node_layout


class Site:
    """Three nodes with a store each, and a catalogue with one image."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self._capsys = folder, capsys
        self.digest = site_catalog.publish(folder / "catalog", "base", ROOT)
        for name in ("vhpc", "n1", "n2", "n3"):
            (folder / f"{name}.toml").write_text(
                f'[images]\ncatalog = "{folder}/catalog"\nstore = "{folder}/{name}"\n'
                f'user_catalog = "{folder}/{{user}}"\n[controller]\nslurm_bin = "{folder}"\n'
            )
        self.nodes(SINFO)
        script = SRUN.format(folder=folder, python=PYTHON, executable=sys.executable)
        self.script("srun", script)

    def script(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)
        (self.folder / name).chmod(0o755)

    def nodes(self, lines: str) -> None:
        self.script("sinfo", f"#!/bin/sh\ncat <<'EOF'\n{lines}EOF\n")

    def on(self, node: str, script: str) -> None:
        """Set the command's script on a node."""
        (self.folder / f"{node}.sh").write_text(script)

    def blobs(self, node: str) -> dict[str, bytes]:
        folder = self.folder / node / "blobs/sha256"
        return {path.name: path.read_bytes() for path in folder.glob("[0-9a-f]*")}

    def run(self, *argv: str, code: int = 0) -> str:
        assert main(argv) == code, self._capsys.readouterr()
        done = self._capsys.readouterr()
        self.error = done.err
        return done.out

    def json(self, *argv: str, code: int = 0) -> Any:
        return json.loads(self.run(*argv, "--json", code=code))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Site:
    monkeypatch.setenv("VHPC_CONFIG", str(tmp_path / "vhpc.toml"))
    monkeypatch.setattr(context, "is_root", lambda: True)
    return Site(tmp_path, capsys)


def until(what: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + limit(seconds)
    while not what():
        assert time.monotonic() < end
        time.sleep(0.02)


# --- one node ----------------------------------------------------------------


def test_stage_copies_once_and_prints_the_amount(site: Site) -> None:
    first = site.json("image", "stage", f"base@{site.digest}")
    assert (first["digest"], first["copied"]) == (site.digest, BYTES)
    found = site.blobs("vhpc")
    assert sorted(found.values()) == sorted([b"kernel", b"initrd", ROOT])
    assert all(hashlib.sha256(data).hexdigest() == name for name, data in found.items())
    assert site.json("image", "stage", f"base@{site.digest}")["copied"] == 0
    assert site.run("image", "stage", "base") == f"base:latest {site_digest(site)} is in the store already\n"


def site_digest(site: Site) -> str:
    """The digest that the name points to."""
    return (site.folder / "catalog/names/base/latest").read_text().strip()


def test_a_damaged_image_is_not_staged(site: Site) -> None:
    root = site.folder / "catalog/blobs/sha256" / hashlib.sha256(ROOT).hexdigest()
    root.write_bytes(ROOT[:-1] + b"!")
    site.run("image", "stage", f"base@{site.digest}", code=1)
    assert site.error.startswith("vhpc: image base:latest@sha256:")
    assert "is damaged" in site.error
    assert ROOT not in site.blobs("vhpc").values()
    assert not list((site.folder / "vhpc").rglob("*.part"))


@pytest.mark.promise("image.stage")
@needs_root
def test_stage_and_a_job_that_starts_copy_each_byte_once(
    site: Site, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job has begun to copy the kernel; the command waits for it, in a process of its own."""
    monkeypatch.setattr(part, "PLAIN", 1)
    monkeypatch.setattr(blob_copy, "CHUNK", 1)
    monkeypatch.setattr(images, "CHECK_S", 0.0)
    (site.folder / "vhpc.toml").write_text(
        f'[images]\ncatalog = "{site.folder}/catalog"\nstore = "{layout.config.images.store}"\n'
    )
    image = FolderCatalog(site.folder / "catalog").resolve(ImageRef.parse("base"))
    pins.pin(layout, image, GENERATION)
    copying = images.stage(layout, image)
    next(copying)
    command = subprocess.Popen(
        [sys.executable, "-m", "vhpc_slurm.cli.main", "image", "stage", "base", "--json"],
        env={**os.environ, "PYTHONPATH": str(PYTHON)},
        stdout=subprocess.PIPE,
    )
    time.sleep(2.0)
    assert command.poll() is None, "it waits for the job's copy"
    staged = finish(copying)
    out, _ = command.communicate(timeout=60)
    assert json.loads(out)["copied"] + staged.copied == BYTES
    assert pins.unused(layout) == [], "the job's pin is as before"
    pins.unpin(layout, image.digest, GENERATION)
    assert len(pins.unused(layout)) == 3


@needs_root
def test_a_full_store_does_not_take_the_images_own_kernel(layout: Layout) -> None:
    """On a real file system of 100 MiB: 64 stay free and 6 are of others."""
    store = Path(layout.config.images.store)
    store.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100m", "none", str(store)], check=True)
    try:
        (store / "of others").write_bytes(bytes(6 << 20))
        image = with_sizes(layout, 10 << 20, 25 << 20)
        with pytest.raises(FabricError, match="no room"):
            finish(images.stage(layout, image))
        assert (store / "blobs/sha256" / image.manifest.kernel.sha256).exists()
        small = with_sizes(layout, 10 << 20, 19 << 20)
        assert finish(images.stage(layout, small)).copied == 19 << 20
        assert images.is_stored(layout, small)
        assert not images.is_stored(layout, image)
    finally:
        subprocess.run(["umount", str(store)], check=True)


def with_sizes(layout: Layout, kernel: int, root: int) -> ImageIdentity:
    image, blobs = publish_image(layout), []
    for name, size in (("kernel", kernel), ("root", root)):
        data = bytes(size)
        blob = Blob(name, hashlib.sha256(data).hexdigest(), size)
        (Path(layout.config.images.catalog) / "blobs/sha256" / blob.sha256).write_bytes(data)
        blobs.append(blob)
    manifest = dataclasses.replace(image.manifest, kernel=blobs[0], root=blobs[1])
    return dataclasses.replace(image, manifest=manifest)


# --- many nodes --------------------------------------------------------------


@needs_root
def test_warm_puts_an_image_into_the_stores_of_nodes(site: Site) -> None:
    done = site.json("image", "warm", "base", "-w", "n[1-2]")
    assert (done["image"], done["digest"]) == ("base:latest", site.digest)
    assert [(one["node"], one["copied"], one["problem"]) for one in done["nodes"]] == [
        ("n1", BYTES, ""),
        ("n2", BYTES, ""),
    ]
    assert site.error.splitlines() == ["vhpc: 1 of 2 nodes done", "vhpc: 2 of 2 nodes done"]
    for node in ("n1", "n2"):
        assert sorted(site.blobs(node).values()) == sorted([b"kernel", b"initrd", ROOT])
    assert site.blobs("vhpc") == {}
    said = site.run("image", "warm", "base", "-w", "n1,n2,n1")
    assert said == f"base:latest {site.digest}: on 2 of 2 nodes, copied to 0 (0 B), 2 had it\n"


def test_srun_gets_node_partition_and_digest(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VHPC_IMAGE", "of-the-caller")
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    for node in ("n1", "n2"):
        site.on(node, "exit 1")
    site.run("image", "warm", "base", "-w", "n[1-2]", code=1)
    for node, partition in (("n1", "main"), ("n2", "spare")):
        asked = (site.folder / f"asked.{node}").read_text().split()
        assert {f"--nodelist={node}", f"--partition={partition}", "--nodes=1", "--mem=256M"} <= set(asked)
        assert asked[-5:] == ["vhpc", "image", "stage", f"base:latest@{site.digest}", "--json"]
        seen = (site.folder / f"environment.{node}").read_text()
        assert "VHPC_" not in seen
        assert "SLURM_" not in seen


@pytest.mark.parametrize(
    ("script", "says"),
    [
        (
            "echo 'srun: job 7 queued and waiting for resources' >&2;"
            "echo 'vhpc: image base is damaged: x' >&2;"
            "echo 'srun: error: n1: task 0: Exited with exit code 1' >&2; exit 1",
            "image base is damaged: x",
        ),
        (
            "echo 'srun: job 7 queued and waiting for resources' >&2;"
            "echo 'srun: error: Unable to allocate resources: Requested nodes are busy' >&2; exit 1",
            "no CPU or memory of it was free for a job within 120 s",
        ),
        (
            "echo 'srun: error: Unable to allocate resources: Access/permission denied' >&2; exit 1",
            "Unable to allocate resources: Access/permission denied",
        ),
        (
            "echo 'slurmstepd: error: execve(): vhpc: No such file or directory' >&2;"
            "echo 'srun: error: n1: task 0: Exited with exit code 2' >&2; exit 2",
            "slurmstepd: error: execve(): vhpc: No such file or directory",
        ),
        ("exit 9", "exit status 9"),
        ("echo hello", "its vhpc printed 'hello'"),
        ("yes", "it printed more than 65536 bytes"),
    ],
)  # fmt: skip
def test_a_node_that_fails_has_one_line(site: Site, script: str, says: str) -> None:
    site.on("n1", script)
    good = {"image": "base:latest", "digest": site.digest, "copied": 0, "seconds": 0.1}
    site.on("n2", f"echo '{json.dumps(good)}'")
    site.run("image", "warm", "base", "-w", "n[1-2]", "--parallel=1", code=1)
    assert site.error.splitlines() == [
        f"vhpc: n1: {says}",
        "vhpc: 1 of 2 nodes done",
        "vhpc: 2 of 2 nodes done",
    ]


def test_a_drained_node_fails_and_the_others_are_warmed(site: Site) -> None:
    good = {"image": "base:latest", "digest": site.digest, "copied": 5, "seconds": 0.1}
    site.on("n1", f"echo '{json.dumps(good)}'")
    done = site.json("image", "warm", "base", "-w", "n3,n1", code=1)
    assert [(one["node"], one["copied"]) for one in done["nodes"]] == [("n3", 0), ("n1", 5)]
    assert "n3: it is drained, no job starts there (run vhpc image stage on it)" in site.error
    assert not (site.folder / "asked.n3").exists()


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("base", "-w", "n1,n9"), "the cluster has no node n9"),
        (("base", "-w", "n[1-"), "is not a list of nodes"),
        (("base", "-w", "n1,--help"), "is not a valid node name"),
        (("own/mine", "-w", "n1"), "copies images of the site only: own/mine:latest is an image of a user"),
        (("none", "-w", "n1"), "image none:latest is unknown"),
    ],
)
def test_a_wrong_request_starts_nothing(site: Site, argv: tuple[str, ...], says: str) -> None:
    site.run("image", "warm", *argv, code=1)
    assert says in site.error
    assert site.error.count("\n") == 1
    assert not list(site.folder.glob("asked.*"))


def test_only_root_stages_and_warms(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "is_root", lambda: False)
    for argv in (("stage", "base"), ("warm", "base", "-w", "n1")):
        site.run("image", *argv, code=1)
        assert f"vhpc image {argv[0]} needs root" in site.error
    assert site.blobs("vhpc") == {}


def test_a_failed_or_garbled_sinfo_is_an_error(site: Site) -> None:
    site.nodes("slurm is fun\n")
    site.run("image", "warm", "base", "-w", "n1", code=4)
    assert "cannot parse Slurm's list of nodes" in site.error
    site.script("sinfo", "#!/bin/sh\necho 'slurm_load_partitions: Unable to contact' >&2\nexit 1\n")
    site.run("image", "warm", "base", "-w", "n1", code=4)
    assert "sinfo failed: slurm_load_partitions: Unable to contact" in site.error


# --- the sruns ---------------------------------------------------------------


def srun(folder: Path, body: str) -> NodeRuns:
    (folder / "srun").write_text(f"#!/bin/sh\ncd {folder}\n{body}\n")
    (folder / "srun").chmod(0o755)
    return NodeRuns(str(folder))


def places(count: int) -> list[Place]:
    return [Place(f"n{number}", "idle", "main") for number in range(count)]


def test_no_more_nodes_at_once_than_asked_for(tmp_path: Path) -> None:
    (tmp_path / "now").mkdir()
    body = "touch now/$$; ls now | wc -l >>counts; sleep 0.4; rm now/$$"
    ends = list(srun(tmp_path, body).run(places(7), ["true"], parallel=3, timeout_s=9, memory_mib=9))
    assert sorted(end.node for end in ends) == [place.node for place in places(7)]
    assert not any(end.problem for end in ends)
    assert max(map(int, (tmp_path / "counts").read_text().split())) == 3


def test_a_command_without_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noderuns, "START_S", 0)
    monkeypatch.setattr(noderuns, "SPARE_S", 0)
    monkeypatch.setattr(noderuns, "END_S", 0.3)
    runs = srun(tmp_path, "trap '' TERM\necho $$ >pid\nwhile :; do sleep 0.1; done")
    (end,) = runs.run(places(1), ["true"], parallel=1, timeout_s=1, memory_mib=9)
    assert end.problem == "no end within the time limit"
    assert not Path("/proc", (tmp_path / "pid").read_text().strip()).exists()


def test_ctrl_c_at_the_start_of_a_step_ends_it(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.on("n1", "exec sleep 600")  # it runs, and nothing in this process knows it yet
    real, started = subprocess.Popen, list[subprocess.Popen[bytes]]()

    def interrupted(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(real(*arguments, **options))
        os.kill(os.getpid(), signal.SIGINT)
        return started[0]

    monkeypatch.setattr("vhpc_slurm.slurm.noderuns.subprocess.Popen", interrupted)
    run = NodeRuns(str(site.folder)).run
    with pytest.raises(KeyboardInterrupt):
        list(run([Place("n1", "idle", "main")], ["vhpc"], parallel=1, timeout_s=60, memory_mib=64))
    assert [child.poll() is not None for child in started] == [True]


def test_ctrl_c_ends_all_steps(site: Site) -> None:
    for node in ("n1", "n2"):
        site.on(
            node, f"trap 'touch ended.{node}; exit 1' TERM\ntouch began.{node}\nwhile :; do sleep 0.1; done"
        )
    code = (
        "import sys\nfrom vhpc_slurm.cli import context, main\n"
        "context.is_root = lambda: True\nsys.exit(main.main())"
    )
    command = subprocess.Popen(
        [sys.executable, "-c", code, "image", "warm", "base", "-w", "n[1-2]"],
        env={**os.environ, "PYTHONPATH": str(PYTHON)},
        stderr=subprocess.PIPE,
    )
    until(lambda: len(list(site.folder.glob("began.*"))) == 2)
    command.send_signal(signal.SIGINT)
    _, said = command.communicate(timeout=30)
    assert (command.returncode, said) == (130, b"")
    assert sorted(path.name for path in site.folder.glob("ended.*")) == ["ended.n1", "ended.n2"]
