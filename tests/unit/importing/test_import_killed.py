# SPDX-License-Identifier: Apache-2.0
"""SIGKILL at each step of imports and changes of a catalogue, and a disk that becomes full."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hostile_rig import Site
from kill_rig import kills
from site_catalog import publish, whole

from pace import limit
from vhpc_slurm.catalog import FolderCatalog, edit
from vhpc_slurm.catalog.changes import STAGING
from vhpc_slurm.errors import UserError
from vhpc_slurm.importing import imports
from vhpc_slurm.importing.imports import import_image, parent_of, save_files
from vhpc_slurm.importing.source import Source
from vhpc_slurm.model import ImageRef

RESULT = {"digest": f"sha256:{'12' * 32}", "special": 0, "process": {}}
PACKAGES = Path(imports.__file__).parents[2]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """Its reader writes a root in two parts, as mkfs.erofs does."""

    def worker(source: Source, out: Path, *_: object) -> dict[str, Any]:
        (out / "layer-0").write_bytes(source.path.read_bytes())
        (out / "root.erofs").write_bytes(b"new root")
        return RESULT

    found = Site(tmp_path)
    (found.source / "x.tar").write_bytes(b"a tar")
    monkeypatch.setattr(imports, "run_worker", worker)
    return found


def imported(site: Site, name: str) -> Callable[[], object]:
    source = Source.parse(str(site.source / "x.tar"))
    return lambda: import_image(site.images, source, ImageRef(name), site.own, "", lambda _line: None)


def saved(site: Site, name: str) -> Callable[[], object]:
    own = FolderCatalog(site.own)
    parent = parent_of(own, own.resolve(ImageRef("before")))

    def files(tar: Path) -> None:
        tar.write_bytes(b"files of a guest")

    return lambda: save_files(
        site.images, files, parent, "job 7", ImageRef(name), site.own, lambda _line: None
    )


def nothing_left(own: Path) -> None:
    """gc removes the files of a killed process, and all names have whole images."""
    edit.collect(own, 0)
    assert not list(own.glob(f"{STAGING}*"))
    assert not [path for path in own.rglob(".*") if path.name != ".lock"]
    assert "before:latest" in whole(own)


@pytest.mark.promise("import.killed")
@pytest.mark.parametrize("change", [imported, saved])
def test_a_kill_at_any_step_leaves_whole_images(
    site: Site, change: Callable[[Site, str], Callable[[], object]]
) -> None:
    seen = 0
    for _ in kills(change(site, "new")):
        seen += 1
        assert set(whole(site.own)) <= {"before:latest", "new:latest"}
        nothing_left(site.own)
        if "new:latest" in whole(site.own):
            edit.remove(site.own, ImageRef("new"))
            edit.collect(site.own, 0)
    assert seen >= 8, "the change has few steps: they are not seen"
    assert set(whole(site.own)) == {"before:latest", "new:latest"}


CHANGES: dict[str, Callable[[Path], object]] = {
    "gc": lambda own: edit.collect(own, 0),
    "tag": lambda own: edit.tag(own, ImageRef("old"), ImageRef("kept")),
    "rm": lambda own: edit.remove(own, ImageRef("old")),
}


@pytest.mark.promise("import.killed")
@pytest.mark.parametrize("name", CHANGES)
def test_a_kill_in_any_change_leaves_whole_images(site: Site, name: str) -> None:
    def rebuild() -> None:
        for number in range(3):
            publish(site.own, "old", b"root %d" % number)
        left = site.own / f"{STAGING}left/out"
        left.mkdir(parents=True, exist_ok=True)
        (left / "layer-0").write_bytes(b"x")

    rebuild()
    seen = 0
    for _ in kills(lambda: CHANGES[name](site.own)):
        seen += 1
        assert set(whole(site.own)) <= {"before:latest", "old:latest", "kept:latest"}
        nothing_left(site.own)
        rebuild()
    assert seen >= 2, "the change has few steps: they are not seen"
    nothing_left(site.own)


def vhpc(site: Site, source: Path) -> subprocess.Popen[str]:
    """The command that imports a source, with the real reader."""
    config = site.top / "vhpc.toml"
    config.write_text(
        f'[controller]\nhost = "localhost"\n[images]\ncatalog = "{site.top}/site"\nimport_kernel = "base"\n'
    )
    code = "import sys; from vhpc_slurm.cli.main import main; sys.exit(main(sys.argv[1:]))"
    return subprocess.Popen(
        [sys.executable, "-c", code, "image", "import", str(source), "new", "--catalog", str(site.own)],
        env=os.environ | {"VHPC_CONFIG": str(config), "PYTHONPATH": str(PACKAGES)},
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.promise("import.killed")
def test_a_killed_import_leaves_no_process(site: Site) -> None:
    """It is killed while its reader unpacks."""
    source = site.source / "slow.tar.gz"
    source.write_bytes(gzip.compress(bytes(64 << 20), 1) * 200)
    with vhpc(site, source) as run:
        assert run.stderr is not None
        assert "vhpc: unpacking\n" in iter(run.stderr.readline, "")
        assert len(list(site.processes())) >= 2
        run.send_signal(signal.SIGKILL)
    until = time.monotonic() + limit(30)
    while list(site.processes()):
        assert time.monotonic() < until, "the reader lives on"
        time.sleep(0.05)
    assert len(list(site.own.glob(f"{STAGING}*"))) == 1
    nothing_left(site.own)


FULL = """
import json, sys
from pathlib import Path
import pytest
sys.path[:0] = json.loads(sys.argv[1])
import test_import_killed
print(json.dumps(getattr(test_import_killed, sys.argv[3])(Path(sys.argv[2]))))
"""


def fill(top: Path, space: int) -> None:
    """Leave some bytes of space on the file system."""
    about = os.statvfs(top)
    with (top / "filler").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(about.f_bavail * about.f_frsize - space, 1))


def refused(site: Site, file: str) -> str:
    """The line that an import fails with, after which all is as it was; empty if it succeeds."""
    before, said = set(whole(site.own)), ""
    try:
        source = Source.parse(str(site.source / file))
        import_image(site.images, source, ImageRef("new"), site.own, "", lambda _line: None)
    except UserError as err:
        said = err.line()
        assert set(whole(site.own)) == before
    (site.top / "filler").unlink()
    assert not list(site.own.glob(f"{STAGING}*"))
    assert not list(site.own.rglob(".new-*"))
    return said


def full_for_reader(top: Path) -> list[str]:
    """Imports of what is no tar when it is unpacked, with ever more space."""
    site, said = Site(top), []
    (site.source / "x.tar.gz").write_bytes(gzip.compress(b"x" * (6 << 20)))
    for space in range(0, 8 << 20, 500_000):
        fill(top, space)
        said.append(refused(site, "x.tar.gz"))
    return said


def full_for_publisher(top: Path) -> list[str]:
    """Imports with ever more space after the root is there, up to one that succeeds."""
    site, said, left = Site(top), [], [0]
    shutil.rmtree(site.own)

    def worker(_source: Source, out: Path, *_: object) -> dict[str, Any]:
        (out / "root.erofs").write_bytes(b"new root")
        fill(top, left[0])
        return RESULT

    setattr(imports, "run_worker", worker)  # noqa: B010 - as monkeypatch does
    (site.source / "x.tar").touch()
    for left[0] in range(0, 20 * 4096, 4096):
        said.append(refused(site, "x.tar"))
        if not said[-1]:
            return said
    raise AssertionError("no import succeeds")


def on_a_small_disk(tmp_path: Path, what: str) -> list[str]:
    """Lines of one of the functions above, with a tmpfs in a mount namespace."""
    script = f'mount -t tmpfs -o size=24m none {tmp_path} && exec "$@"'
    paths = json.dumps(sys.path)
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, "sh"]
    done = subprocess.run(
        [*command, sys.executable, "-c", FULL, paths, str(tmp_path), what],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    said: list[str] = json.loads(done.stdout)
    return said


@pytest.mark.promise("import.full")
def test_a_disk_that_is_full_for_the_reader_is_one_line(tmp_path: Path) -> None:
    *full, last = on_a_small_disk(tmp_path, "full_for_reader")
    assert "layer 1 is not a sound tar" in last
    assert full[0].endswith("the catalogue has no space left to unpack it")
    assert all("no space left" in line or "not a sound tar" in line for line in full)


@pytest.mark.promise("import.full")
def test_a_disk_full_while_publishing_keeps_images_whole(tmp_path: Path) -> None:
    *full, last = on_a_small_disk(tmp_path, "full_for_publisher")
    assert last == ""
    assert len(full) >= 3
    assert all(re.search("cannot change the image catalogue .*: No space left", line) for line in full), full
