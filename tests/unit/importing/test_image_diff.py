# SPDX-License-Identifier: Apache-2.0
"""vhpc image diff, with roots that mkfs.erofs has made, and roots that are damaged."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from site_catalog import BASE, publish

from vhpc_slurm.catalog import FolderCatalog
from vhpc_slurm.cli import options
from vhpc_slurm.cli.images.diff import diff
from vhpc_slurm.config import Config
from vhpc_slurm.config.images import Images
from vhpc_slurm.errors import UserError
from vhpc_slurm.importing import listing, memory
from vhpc_slurm.importing.compare import Side, compare
from vhpc_slurm.importing.erofs import FileSystem
from vhpc_slurm.importing.tree import RefusedError
from vhpc_slurm.model import ImageRef
from vhpc_slurm.progress import Amount

IMAGES = Images()
BLOCK = 4096


def erofs(tree: Path, *options: str) -> bytes:
    target = tree.with_suffix(".erofs")
    subprocess.run(["mkfs.erofs", *options, target, tree], check=True, capture_output=True)
    return target.read_bytes()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Files of many kinds; a folder whose entries need several blocks."""
    top = tmp_path / "tree"
    (top / "etc/closed").mkdir(parents=True)
    (top / "etc/passwd").write_text("root:x:0:0\n")
    (top / "etc/closed/secret").write_text("s")
    (top / "etc/closed/secret").chmod(0)
    (top / "etc/closed").chmod(0)
    (top / "link").symlink_to("/etc/passwd")
    os.mkfifo(top / "pipe")
    os.link(top / "etc/passwd", top / "hard")
    (top / "large").write_bytes(os.urandom(50_000) + b"x" * 200_000)
    for number in range(300):
        (top / f"etc/a-file-with-a-long-name-{number}").write_text(str(number))
    (top / os.fsdecode(b"not\xffutf8")).write_text("1")
    return top


def side(catalog: Path, name: str) -> Side:
    return Side(FolderCatalog(catalog).resolve(ImageRef(name)), FolderCatalog(catalog))


def compared(
    tmp_path: Path, before: bytes, after: bytes, images: Images = IMAGES
) -> dict[str, tuple[str, ...]]:
    """Path -> kind of the change, and what differs."""
    catalog = tmp_path / "catalog"
    publish(catalog, "a", before)
    publish(catalog, "b", after)
    found = compare(images, side(catalog, "a"), side(catalog, "b"), lambda _line: None)
    return {change.path: (change.kind, *change.what) for change in found.files}


@pytest.mark.parametrize("options", [(), ("-zlz4hc",), ("-zlz4", "-Eztailpacking", "-C65536")])
def test_changes_are_found(tree: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    before = erofs(tree, *options)
    (tree / "etc/passwd").write_text("root:y:0:0\n")
    (tree / "etc/a-file-with-a-long-name-7").write_text("77")
    (tree / "etc/closed").chmod(0o755)
    (tree / "link").unlink()
    (tree / "link").symlink_to("/etc/shadow")
    (tree / "pipe").unlink()
    (tree / "pipe").mkdir()
    (tree / "new").write_text("n")
    shutil.move(tree / "large", tree / "moved")
    (tree / os.fsdecode(b"not\xffutf8")).chmod(0o4711)
    assert compared(tmp_path, before, erofs(tree, *options)) == {
        "etc/a-file-with-a-long-name-7": ("changed", "size", "content"),
        "etc/closed": ("changed", "mode"),
        "etc/passwd": ("changed", "content"),
        "hard": ("changed", "content"),
        "large": ("removed",),
        "link": ("changed", "content"),
        "moved": ("added",),
        "new": ("added",),
        os.fsdecode(b"not\xffutf8"): ("changed", "mode"),
        "pipe": ("changed", "type", "mode"),
    }


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change owners: run as root")
def test_owners_devices_and_capabilities_differ(tree: Path, tmp_path: Path) -> None:
    os.mknod(tree / "null", 0o20666, os.makedev(1, 3))
    os.mknod(tree / "stays", 0o20666, os.makedev(1, 3))
    before = erofs(tree)
    os.chown(tree / "large", 5, 70_000)
    os.chown(tree / "hard", 0, 6)
    (tree / "null").unlink()
    os.mknod(tree / "null", 0o20666, os.makedev(1, 5))
    os.setxattr(tree / "etc", "user.color", b"red")
    assert compared(tmp_path, before, erofs(tree)) == {
        "etc": ("changed", "xattrs"),
        "etc/passwd": ("changed", "gid"),
        "hard": ("changed", "gid"),
        "large": ("changed", "uid", "gid"),
        "null": ("changed", "content"),
    }


def test_equal_files_in_other_bytes_do_not_differ(tree: Path, tmp_path: Path) -> None:
    plain, packed = erofs(tree, "-T1"), erofs(tree, "-zlz4hc", "-T2")
    assert plain != packed
    assert compared(tmp_path, plain, packed) == {}


def test_the_command_prints_lines_or_json(
    tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "config", lambda: Config(images=IMAGES))
    catalog = tmp_path / "catalog"
    publish(catalog, "a", erofs(tree))
    (tree / "hard").unlink()
    (tree / "large").chmod(0o600)
    (tree / "line\nfeed").write_text("")
    before = BASE["description"]
    monkeypatch.setitem(BASE, "description", "another one")
    publish(catalog, "b", erofs(tree))
    assert diff("a", "b", catalog=catalog) == 1
    said = capsys.readouterr()
    assert [line for line in said.out.splitlines() if not line.startswith("manifest root.")] == [
        f'manifest description: "{before}" -> "another one"',
        "- hard  file, mode 0644, owner 0:0, 11 B",
        "~ large  mode 0644 -> 0600",
        "+ line\\nfeed  file, mode 0644, owner 0:0, 0 B",
    ]
    steps = [line for line in said.err.splitlines() if not re.search(r"MiB \(\d+ %\)$", line)]
    assert steps == ["vhpc: reading a:latest", "vhpc: reading b:latest"]
    assert diff("a", "b", catalog=catalog, as_json=True) == 1
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["before"]["image"] == "a:latest"
    assert [(row["path"], row["change"]) for row in found["files"]] == [
        ("hard", "removed"),
        ("large", "changed"),
        ("line\nfeed", "added"),
    ]
    assert found["files"][1]["before"]["mode"] == "0644"
    assert found["files"][1]["differs"] == ["mode"]
    assert diff("b", "b", catalog=catalog) == 0
    assert capsys.readouterr().out == "no difference\n"


def test_progress_is_reported_as_amounts(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the blob that is checked, of fsck.erofs, and of the files that are read; each up to its end."""
    monkeypatch.setattr(listing, "TELL_S", 0.0)
    monkeypatch.setattr(listing, "POLL_S", 0.001)
    root, out, told = tmp_path / "root", tmp_path / "out", list[tuple[str, int, int]]()
    (tree / "much").write_bytes(os.urandom(30 << 20))
    root.write_bytes(erofs(tree))
    out.mkdir()
    request = {"max_files": 1000, "max_bytes": 1 << 30, "memory": 0}
    listing.write_listing(request, root, out, tmp_path, lambda *amount: told.append(amount))
    size = sum(path.lstat().st_size for path in tree.rglob("*") if path.is_file() and not path.is_symlink())
    assert {total for _, _, total in told} == {size}
    assert {what for what, _, _ in told} == {"unpacked", "read"}
    read = [done for what, done, _ in told if what == "read"]
    assert read == sorted(read)
    assert read[-1] == size
    catalog, lines = tmp_path / "catalog", list[str]()
    publish(catalog, "a", erofs(tree, "-T1"))
    publish(catalog, "b", erofs(tree, "-T2"))
    compare(IMAGES, side(catalog, "a"), side(catalog, "b"), lines.append)
    assert any(isinstance(line, Amount) and line.startswith("checked ") for line in lines)


@pytest.mark.parametrize(("limit", "place"), [(64 << 20, "memory"), (0, "out"), (300_000, "out")])
def test_files_are_unpacked_in_memory_if_they_fit(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int, place: str
) -> None:
    """On a disk that others use, thousands of files take minutes. The listing is the same in both places."""
    unpacked: list[Path] = []
    unpack = listing._unpack

    def noted(root: Path, where: Path, *rest: Any, **more: Any) -> None:
        unpacked.append(where.parent)
        unpack(root, where, *rest, **more)

    monkeypatch.setattr(listing, "_unpack", noted)
    root, found = tmp_path / "root", {}
    root.write_bytes(erofs(tree))
    for case, most in (("a", limit), ("b", 0)):
        top = tmp_path / case
        for name in ("out", "memory"):
            (top / name).mkdir(parents=True)
        request = {"max_files": 1000, "max_bytes": 1 << 30, "memory": most}
        listing.write_listing(request, root, top / "out", top / "memory", lambda *_: None)
        found[case] = (top / "out/files").read_bytes()
    assert unpacked == [tmp_path / "a" / place, tmp_path / "b/out"]
    assert found["a"] == found["b"]


@pytest.mark.parametrize(
    ("limits", "room"),
    [
        ({}, 2 << 30),
        ({"": ("max", 5)}, 2 << 30),
        ({"user.slice/a": (600 << 20, 200 << 20)}, 100 << 20),
        ({"user.slice/a": ("max", 1), "user.slice": (600 << 20, 200 << 20)}, 100 << 20),
        ({"user.slice": (1000, 2000)}, 0),
        ({"user.slice": ("nonsense", 1)}, 0),
    ],
)
def test_no_more_memory_is_filled_than_is_free(
    tmp_path: Path, limits: dict[str, tuple[int | str, int]], room: int
) -> None:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self/cgroup").write_text("4:memory:/v1\n0::/user.slice/a\n")
    (proc / "meminfo").write_text("MemTotal:  99999999 kB\nMemAvailable:   16777216 kB\n")
    for folder, (most, used) in limits.items():
        (cgroups / folder).mkdir(parents=True, exist_ok=True)
        (cgroups / folder / "memory.max").write_text(f"{most}\n")
        (cgroups / folder / "memory.current").write_text(f"{used}\n")
    assert memory.room(proc, cgroups) == room
    (proc / "meminfo").write_text("MemAvailable:   409600 kB\n")
    assert memory.room(proc, tmp_path / "none") == 100 << 20
    (proc / "meminfo").unlink()
    assert memory.room(proc, cgroups) == 0


def patched(data: bytes, offset: int, form: str, *values: int) -> bytes:
    found = bytearray(data)
    struct.pack_into(f"<{form}", found, offset, *values)
    return bytes(found)


def root_of(data: bytes) -> tuple[int, int]:
    """Offset of the root's inode, and of its first block of names."""
    with memoryfile(data) as fd:
        system = FileSystem(fd)
        (number,) = struct.unpack_from("<H", data, 1024 + 14)
        inode = system.inode(number)
    place = struct.unpack_from("<I", data, 1024 + 40)[0] * BLOCK + number * 32
    names = inode.tail if inode.size < BLOCK else inode.start * BLOCK
    return place, names


class memoryfile:  # noqa: N801 - used like a function
    """A descriptor of a file with some bytes."""

    def __init__(self, data: bytes) -> None:
        self.fd = os.memfd_create("image")
        os.write(self.fd, data)

    def __enter__(self) -> int:
        return self.fd

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)


DAMAGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "no file system": (lambda data: b"\0" * len(data), "it is not an EROFS"),
    "short": (lambda data: data[:1100], "the superblock is beyond the end"),
    "cut off": (lambda data: data[:1300], "is beyond the end"),
    "huge blocks": (lambda data: patched(data, 1024 + 12, "B", 31), "blocks have a size"),
    "new features": (
        lambda data: patched(data, 1024 + 80, "I", 0x80),
        "features that vhpc does not know: 0x80",
    ),
    "a root far away": (lambda data: patched(data, 1024 + 40, "I", 0xFFFFFFF0), "beyond the end"),
    "a root that is a file": (
        lambda data: patched(data, root_of(data)[0] + 4, "H", 0o100644),
        "not a folder",
    ),
    "a huge folder": (lambda data: patched(data, root_of(data)[0] + 8, "I", 0xFFFFFFFF), "form that vhpc"),
    "a compressed folder": (lambda data: patched(data, root_of(data)[0], "H", 3 << 1), "form that vhpc"),
    "bad names": (lambda data: patched(data, root_of(data)[1] + 8, "H", 7), "is damaged"),
    "names backwards": (
        lambda data: patched(data, root_of(data)[1] + 20, "H", 1),
        "has a name that is not valid",
    ),
    "a slash in a name": (
        lambda data: data.replace(b"etcetera", b"../../et"),
        "has a name that is not valid",
    ),
    "two equal names": (lambda data: data.replace(b"etcetera", b"othernam"), "two files of one name"),
    "a circle": (
        lambda data: patched(data, root_of(data)[1] + 2 * 12, "Q", struct.unpack_from("<H", data, 1038)[0]),
        "is in two places",
    ),
}


@pytest.fixture
def small(tmp_path: Path) -> bytes:
    """A root with the folders etcetera and othernam."""
    top = tmp_path / "small"
    for name in ("etcetera", "othernam"):
        (top / name).mkdir(parents=True)
        (top / name / "file").write_text(name)
    return erofs(top, "-T0", "-Elegacy-compress")


@pytest.mark.promise("attack.diff")
@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_root_is_refused(small: bytes, name: str) -> None:
    change, says = DAMAGES[name]
    with memoryfile(change(small)) as fd, pytest.raises(RefusedError, match=says):
        list(FileSystem(fd).walk(1000))


def test_the_number_of_files_is_limited(small: bytes) -> None:
    with memoryfile(small) as fd, pytest.raises(RefusedError, match="more than 3 files"):
        list(FileSystem(fd).walk(3))


@pytest.mark.promise("attack.diff")
def test_random_damage_is_refused_or_read(small: bytes) -> None:
    """Whatever the bytes are, the reader ends: with files, or with a RefusedError."""
    ended = 0
    for place in range(1024, len(small), 7):
        with memoryfile(patched(small, place, "B", small[place] ^ 0xA5)) as fd:
            try:
                files = list(FileSystem(fd).walk(1000))
                ended += len(files) <= 1000
            except RefusedError:
                ended += 1
    assert ended == len(range(1024, len(small), 7))


def test_a_root_without_a_file_system_is_one_line(tree: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read the root of b:latest: it is not an EROFS"):
        compared(tmp_path, erofs(tree), b"rubbish" * 1000)


def test_damage_that_only_fsck_sees_is_one_line(tree: Path, tmp_path: Path) -> None:
    (tree / "text").write_text("".join(f"{number * number}\n" for number in range(50_000)))
    data = erofs(tree, "-zlz4hc")
    with pytest.raises(UserError, match=r"cannot read the root of b:latest: fsck.erofs") as failed:
        compared(tmp_path, data, data[:-40_000] + os.urandom(40_000))
    assert "\n" not in failed.value.line()


@pytest.mark.promise("attack.diff")
def test_the_unpacked_bytes_are_limited(tree: Path, tmp_path: Path) -> None:
    (tree / "zeros").write_bytes(bytes(3 << 20))
    images = Images(import_max_mib=2)
    with pytest.raises(UserError, match="its files have more than 2 MiB"):
        compared(tmp_path, erofs(tree, "-zlz4hc"), b"rubbish", images)


@pytest.mark.promise("attack.diff")
def test_an_invalid_listing_is_refused(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def worker(_source: object, out: Path, *_: object) -> dict[str, Any]:
        (out / "files").write_text('["etc", "folder", 493, 0, 0, 0, 7, {}]\n')
        return {}

    monkeypatch.setattr("vhpc_slurm.importing.compare.run_worker", worker)
    with pytest.raises(UserError, match="its listing: Expected `str`, got `int`"):
        compared(tmp_path, b"a", b"b")
