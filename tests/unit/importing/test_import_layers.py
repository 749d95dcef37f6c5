# SPDX-License-Identifier: Apache-2.0
"""Layers become one tree, as container runtimes make it (what is refused: ``test_import_hostile``)."""

from __future__ import annotations

import gzip
import io
import os
import random
import subprocess
import tarfile
from pathlib import Path

import pytest
from containers import Layout, entry, tar
from import_rig import applied, listing, root_tar

from vhpc_slurm.importing.layers import Budget, apply, unpack
from vhpc_slurm.importing.tree import RefusedError, Tree

DIR, LINK, HARD = tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE


def test_upper_layers_replace_and_remove(tmp_path: Path) -> None:
    lower = tar("a/", ("a/one", "1"), ("a/two", "2"), "b/", ("b/x", "x"), "c/", ("c/y", "y"), ("d", "file"))
    upper = tar("a/.wh.one", ("a/two", "22"), ".wh.b", "c/.wh..wh..opq", ("c/z", "z"), "d/", ("d/new", "n"))
    assert listing(*applied(tmp_path, lower, upper)) == {
        "a": "dir", "a/two": "22", "c": "dir", "c/z": "z", "d": "dir", "d/new": "n",
    }  # fmt: skip


def test_an_image_may_have_300_layers(tmp_path: Path) -> None:
    count = 300
    tars = [tar("d/", (f"d/{number}", str(number)), ("d/last", str(number))) for number in range(count)]
    found = listing(*applied(tmp_path, *tars))
    assert found["d/last"] == str(count - 1)
    assert [found[f"d/{number}"] for number in range(count)] == [str(number) for number in range(count)]


@pytest.mark.parametrize(
    ("upper", "expected"),
    [
        # a whiteout is of lower layers only, wherever it stands in its own
        ([("a/new", "n"), "a/.wh..wh..opq"], {"a": "dir", "a/new": "n"}),
        ([("a/deep/new", "n"), "a/.wh..wh..opq"], {"a": "dir", "a/deep": "dir", "a/deep/new": "n"}),
        (["a/.wh.deep", ("a/deep/new", "n")], {"a": "dir", "a/deep": "dir", "a/deep/new": "n", "a/one": "1"}),
        ([("a/one", "11"), "a/.wh.one"], {"a": "dir", "a/deep": "dir", "a/deep/x": "x", "a/one": "11"}),
        (["a/.wh.none", "none/.wh.x"], {"a": "dir", "a/deep": "dir", "a/deep/x": "x", "a/one": "1"}),
        (["a/.wh..wh.plnk"], {"a": "dir", "a/deep": "dir", "a/deep/x": "x", "a/one": "1"}),
    ],
)
def test_whiteouts_spare_their_own_layer(tmp_path: Path, upper: list[str], expected: dict[str, str]) -> None:
    lower = tar("a/", ("a/one", "1"), "a/deep/", ("a/deep/x", "x"))
    assert listing(*applied(tmp_path, lower, tar(*upper))) == expected


def test_parents_that_are_links_are_followed_inside(tmp_path: Path) -> None:
    lower = tar("usr/lib/", entry("lib", LINK, linkname="usr/lib"), entry("up", LINK, linkname="../../usr"))
    upper = tar(("lib/a", "a"), ("up/b", "b"))
    found = listing(*applied(tmp_path, lower, upper))
    assert found == {
        "lib": "-> usr/lib",
        "up": "-> ../../usr",
        "usr": "dir",
        "usr/b": "b",
        "usr/lib": "dir",
        "usr/lib/a": "a",
    }


def test_hard_links_stay_one_file_within_a_layer(tmp_path: Path) -> None:
    lower = tar(("b", "data"), entry("a", HARD, linkname="b"), entry("c", HARD, linkname="./b"))
    assert listing(*applied(tmp_path, lower)) == {"a": "data", "b": "= a", "c": "= a"}
    upper = tar(entry("d", HARD, linkname="b"), ".wh.b")
    (tmp_path / "again").mkdir()
    assert listing(*applied(tmp_path / "again", lower, upper)) == {"a": "data", "c": "= a", "d": "data"}


def test_owners_modes_times_and_capabilities_are_kept(tmp_path: Path) -> None:
    capability = b"\x01\x00\x00\x02\x00 \x00\x00\xff\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"
    headers = {
        "SCHILY.xattr.security.capability": capability.decode("utf-8", "surrogateescape"),
        "SCHILY.xattr.user.note": "text",
        "SCHILY.xattr.trusted.overlay.opaque": "y",
        "SCHILY.xattr.security.selinux": "label",
    }
    info = entry("ping", mode=0o104755, uid=4000000000, gid=7, mtime=1700000000, pax_headers=headers)
    strange = "n\n\udcff ü"
    tree, paths = applied(tmp_path, tar((info, "data"), strange))
    with root_tar(tree, paths) as archive:
        ping = archive.getmember("ping")
        assert (ping.mode, ping.uid, ping.gid, ping.mtime) == (0o4755, 4000000000, 7, 1700000000)
        kept = {key: text for key, text in ping.pax_headers.items() if key.startswith("SCHILY")}
        assert kept == {key: headers[key] for key in list(headers)[:2]}
        assert strange in archive.getnames()


def test_holes_of_sparse_files_are_zeros(tmp_path: Path) -> None:
    """Written by GNU tar."""
    with (tmp_path / "sparse").open("wb") as file:
        for offset in (1 << 16, 1 << 20):
            file.seek(offset)
            file.write(b"x" * 5000)
        file.truncate(3 << 20)
    made = subprocess.run(
        ["tar", "-C", tmp_path, "-S", "-cf", "-", "sparse"], check=True, stdout=subprocess.PIPE
    ).stdout
    assert len(made) < 100_000
    (tmp_path / "in").mkdir()
    with root_tar(*applied(tmp_path / "in", made)) as archive:
        found = archive.extractfile("sparse")
        assert found is not None
        assert found.read() == (tmp_path / "sparse").read_bytes()


def test_devices_and_pipes_are_left_out_and_counted(tmp_path: Path) -> None:
    (tmp_path / "tar").write_bytes(
        tar(entry("null", tarfile.CHRTYPE), entry("disk", tarfile.BLKTYPE), entry("p", tarfile.FIFOTYPE), "x")
    )
    tree = Tree(10)
    assert apply(tree, 0, tmp_path / "tar") == 3
    assert [path for path, _ in tree.walk()] == ["x"]


def unpacked(tmp_path: Path, data: bytes, compression: str, limit: int = 1 << 20) -> bytes:
    target = tmp_path / "unpacked"
    unpack(io.BytesIO(data), compression, target, Budget(limit))
    return target.read_bytes()


def test_compressed_layers_are_unpacked(tmp_path: Path) -> None:
    data = random.Random(1).randbytes(300_000)
    for compression, packed in (
        ("", data),
        ("gzip", gzip.compress(data[:1000]) + gzip.compress(data[1000:])),
        ("zstd", subprocess.run(["zstd", "-c"], input=data, check=True, stdout=subprocess.PIPE).stdout),
    ):
        assert unpacked(tmp_path, packed, compression) == data
        (tmp_path / "unpacked").unlink()


@pytest.mark.promise("attack.import-bomb")
@pytest.mark.parametrize("compression", ["", "gzip", "zstd"])
def test_a_bomb_writes_no_more_than_the_limit(tmp_path: Path, compression: str) -> None:
    data = bytes(64 << 20)
    if compression == "gzip":
        data = gzip.compress(data)
    elif compression == "zstd":
        data = subprocess.run(["zstd", "-c"], input=data, check=True, stdout=subprocess.PIPE).stdout
    with pytest.raises(RefusedError, match="more than 1 MiB when unpacked"):
        unpacked(tmp_path, data, compression)
    assert (tmp_path / "unpacked").stat().st_size <= 1 << 20


NAMES = ("a", "b", "c")


def random_layer(dice: random.Random, known: set[str]) -> bytes:
    """Folders, files, links and whiteouts of what ``known`` layers may have; each name once."""
    entries: dict[str, object] = {}
    for _ in range(dice.randint(1, 8)):
        path = "/".join(dice.choice(NAMES) for _ in range(dice.randint(1, 3)))
        above, _, name = path.rpartition("/")
        kind = dice.choice(("dir", "file", "link", "whiteout", "opaque"))
        if kind == "whiteout" and path in known:
            entries.setdefault(path, f"{above}/.wh.{name}".lstrip("/"))
        elif kind == "opaque" and path in known:
            entries.setdefault(f"{path}/.wh..wh..opq", f"{path}/.wh..wh..opq")
        elif kind == "dir":
            entries.setdefault(path, f"{path}/")
        elif kind == "file":
            entries.setdefault(path, (path, f"{dice.random()}"))
        elif kind == "link":
            entries.setdefault(path, entry(path, LINK, linkname=dice.choice(NAMES)))
    # a name below something that is not a folder makes no layer
    for path in sorted(entries):
        parents = [path[:at] for at, char in enumerate(path) if char == "/"]
        if any(parent in entries and entries[parent] != f"{parent}/" for parent in parents):
            del entries[path]
    known.update(entries)
    return tar(*(entries[path] for path in sorted(entries)))  # type: ignore[arg-type]


@pytest.mark.promise("import.container")
@pytest.mark.parametrize("seed", range(12))
def test_umoci_makes_the_same_of_random_layers(tmp_path: Path, seed: int) -> None:
    dice, known = random.Random(seed), set[str]()
    tars = [random_layer(dice, known) for _ in range(4)]
    layout = Layout(tmp_path / "layout")
    layout.write(layout.image(tars, "x"))
    unpacked = tmp_path / "bundle"
    rootless = ["--rootless"] if os.geteuid() else []
    done = subprocess.run(
        ["umoci", "unpack", *rootless, "--image", f"{layout.top}:x", unpacked],
        check=False, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    (tmp_path / "layers").mkdir()
    if done.returncode != 0:
        with pytest.raises(RefusedError):
            applied(tmp_path / "layers", *tars)
    else:
        assert listing(*applied(tmp_path / "layers", *tars)) == theirs(unpacked / "rootfs")


def theirs(top: Path) -> dict[str, str]:
    found = {}
    for path in sorted(top.rglob("*")):
        name = str(path.relative_to(top))
        if path.is_symlink():
            found[name] = f"-> {path.readlink()}"
        else:
            found[name] = "dir" if path.is_dir() else path.read_text()
    return found
