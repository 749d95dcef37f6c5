# SPDX-License-Identifier: Apache-2.0
"""A root whose bytes were changed after it was published: no guest reads a changed byte.

The kernel of the image decides, in QEMU; where a file's bytes are, dump.erofs says.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from image_boot import QEMU, Boot, Image, boot, build

from vhpc_slurm.bootfiles.newc import Archive

BLOCK, HASHES = 4096, 128
# A file that nothing needs in these boots, of several hundred KiB.
FILE = "/usr/bin/dpkg"
DUMP = shutil.which("dump.erofs", path="/usr/sbin:/usr/bin:/sbin:/bin")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(QEMU is None, reason="apt-get install qemu-system-x86"),
    pytest.mark.skipif(DUMP is None, reason="apt-get install erofs-utils"),
]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory, standin: Path, init: Path) -> Image:
    return build("debian-minimal", tmp_path_factory.mktemp("catalog"), standin, init)


@pytest.fixture
def disk(image: Image, tmp_path: Path) -> Path:
    """A copy of the root, to be changed."""
    return Path(shutil.copyfile(image.blob("root"), tmp_path / "root"))


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def extents(image: Image) -> tuple[int, list[tuple[int, int]]]:
    """Size of FILE in bytes, and for each of its parts: its first byte, and where on the disk it begins."""
    assert DUMP is not None
    said = subprocess.run(
        [DUMP, "-e", f"--path={FILE}", image.blob("root")], check=True, capture_output=True, text=True
    ).stdout
    size = re.search(r"^Size: (\d+)", said, re.MULTILINE)
    assert size is not None
    found = re.findall(r"^\s*\d+:\s*(\d+)\.\.\s*\d+ \|\s*\d+ :\s*(\d+)\.\.", said, re.MULTILINE)
    return int(size[1]), [(int(first), int(place)) for first, place in found]


def read(image: Image, disk: Path | None = None) -> Boot:
    return boot(image, f"vhpc.agent.read={FILE}", disk=disk)


def levels(blocks: int) -> list[int]:
    """Blocks of each level of the tree, as they are on the disk: the level of the root first."""
    found: list[int] = []
    while blocks > 1:
        blocks = -(-blocks // HASHES)
        found.insert(0, blocks)
    return found


def test_an_intact_root_is_read_whole(image: Image) -> None:
    done = read(image)
    assert done.lines[0].startswith("standin: started")
    assert done.said("read") == [f"{extents(image)[0]} to the end"]
    assert done.said("python") == ["status=0 42"]


@pytest.mark.promise("image.verity", "attack.root-file")
def test_a_changed_byte_of_a_file_is_an_error(image: Image, disk: Path) -> None:
    size, (_, (first, place), *_) = extents(image)
    flip(disk, place + 100)
    done = read(image, disk)
    assert done.started_s is not None
    (said,) = done.said("read")
    count, error = said.split(" ", 1)
    assert error == "Input/output error"
    assert 0 < int(count) <= first < size
    block = place // BLOCK
    assert any(f"verity: 254:0: data block {block} is corrupted" in line for line in done.lines)
    assert done.said("python") == ["status=0 42"]
    assert done.said("overlay") == ["writable"]


@pytest.mark.promise("image.verity")
def test_a_changed_hash_is_an_error_too(image: Image, disk: Path) -> None:
    data, place = image.manifest["verity"]["data_size"], extents(image)[1][1][1] // BLOCK
    *above, _ = levels(data // BLOCK)
    leaf = data // BLOCK + sum(above) + place // HASHES
    flip(disk, leaf * BLOCK + place % HASHES * 32)
    done = read(image, disk)
    assert done.started_s is not None
    assert done.said("read")[0].endswith(" Input/output error")
    assert any(f"verity: 254:0: metadata block {leaf} is corrupted" in line for line in done.lines)


def changed(image: Image, disk: Path, how: str) -> Boot:
    found = image.manifest["verity"]
    blocks = found["data_size"] // BLOCK
    given = {
        "another root hash": f"vhpc.verity={blocks}:{'0' * 64}",
        "fewer blocks": f"vhpc.verity={blocks - 1}:{found['root_hash']}",
        "no hash": "vhpc.verity=off",
    }
    if how == "first block":
        flip(disk, 1024)
    elif how == "top of the tree":
        flip(disk, found["data_size"])
    elif how == "without tree":
        with disk.open("r+b") as file:
            file.truncate(found["data_size"])
    return boot(image, given.get(how, ""), disk=disk)


MISMATCH = r"the root does not match its root hash \(was the file on the node changed\?\): Input/output error"


@pytest.mark.promise("image.verity", "attack.root-file")
@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("another root hash", MISMATCH),
        ("fewer blocks", MISMATCH),
        ("first block", MISMATCH),
        ("top of the tree", MISMATCH),
        ("without tree", r"cannot set up dm-verity for the root: .*"),
        ("no hash", r"vhpc\.verity=off is not BLOCKS:ROOTHASH"),
    ],
)
def test_a_root_that_is_not_the_images_does_not_boot(image: Image, disk: Path, how: str, says: str) -> None:
    done = changed(image, disk, how)
    assert done.started_s is None
    (ours,) = [line for line in done.lines if "vhpc-init:" in line]
    assert re.fullmatch(f"vhpc-init: {says}", ours)


def test_without_the_kernels_module_nothing_boots(image: Image, tmp_path: Path) -> None:
    archive = Archive()
    archive.file("modules/verity", b"")
    initrd = tmp_path / "initrd"
    initrd.write_bytes(image.blob("initrd").read_bytes() + archive.to_bytes())
    done = boot(image, initrd=initrd)
    assert done.started_s is None
    says = r"vhpc-init: cannot open /dev/mapper/control \(no dm-verity in the initrd\?\): No such .*"
    (ours,) = [line for line in done.lines if "vhpc-init:" in line]
    assert re.fullmatch(says, ours)
