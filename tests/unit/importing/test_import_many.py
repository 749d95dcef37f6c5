# SPDX-License-Identifier: Apache-2.0
"""A source with very many files: all of them are taken, or the import is refused with one line."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import msgspec
import pytest
from hostile_rig import Site

COUNT = 100_000
MEMORY_MIB = 400
pytestmark = pytest.mark.long
# The reader without its sandbox and without mkfs.erofs, which gets a tar; prints what is in the tar, and how
# much memory this took.
READ = """
import sys
from pathlib import Path
from vhpc_slurm.importing import layers, rootfs
from vhpc_slurm.importing.tree import Tree
source, folder, most = sys.argv[1:]
tree, path = Tree(int(most)), Path(folder, "layer")
with open(source, "rb") as file:
    layers.unpack(file, "", path, layers.Budget(1 << 30))
layers.apply(tree, 0, path)
with open(Path(folder, "root.tar"), "wb") as out:
    rootfs.write_tar(tree, [path], out)
# not ru_maxrss: a process that was forked begins with that of its parent
print(int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) >> 10)
"""


def name(number: int) -> str:
    return f"d/{number:0>60}"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("many") / "x.tar"
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as archive:
        for number in range(COUNT):
            archive.addfile(tarfile.TarInfo(name(number)))
    return path


@pytest.mark.promise("attack.import-bomb")
def test_all_of_100000_files_are_read_in_bounded_memory(source: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", READ, str(source), str(tmp_path), str(COUNT + 10)]
    done = subprocess.run(command, check=True, capture_output=True, timeout=600)
    assert json.loads(done.stdout) < MEMORY_MIB
    listed = subprocess.run(["tar", "-tf", tmp_path / "root.tar"], check=True, capture_output=True, text=True)
    found = {line.removeprefix("./") for line in listed.stdout.splitlines()}
    assert len([line for line in found if line.startswith("d/") and line != "d/"]) == COUNT
    assert found >= {name(number) for number in range(COUNT)}


@pytest.mark.promise("attack.import-bomb")
def test_one_file_too_many_of_100000_leaves_nothing(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(site.work))
    limits = {"import_max_mib": 256, "import_max_files": COUNT, "import_timeout_s": 600}
    site.images = msgspec.structs.replace(site.images, **limits)
    assert site.refusal(str(source)) == f"cannot import tar:{source}: it has more than {COUNT} files"
