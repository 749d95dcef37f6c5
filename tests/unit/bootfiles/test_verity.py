# SPDX-License-Identifier: Apache-2.0
"""Roots with a hash tree: what a manifest says, what guests get, and how images are made.

tests/image/test_verity_boot.py boots such images.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from site_catalog import publish

from vhpc_slurm.bootfiles import verity
from vhpc_slurm.bootfiles.errors import BootFileError
from vhpc_slurm.catalog import FolderCatalog
from vhpc_slurm.catalog import manifest as manifests
from vhpc_slurm.catalog.manifest import Manifest, canonical, decode_manifest, decode_whole, tree_size
from vhpc_slurm.cli import options
from vhpc_slurm.cli.images.listing import show
from vhpc_slurm.config import Config
from vhpc_slurm.config.images import Images
from vhpc_slurm.domain.boot import kernel_cmdline
from vhpc_slurm.errors import UserError
from vhpc_slurm.importing import imports, sandbox
from vhpc_slurm.importing.imports import Parent, import_image, save_files
from vhpc_slurm.importing.source import Source
from vhpc_slurm.model import ImageRef

CHECKOUT = Path(__file__).parents[3]
SCHEMA = CHECKOUT / "docs/image-manifest.schema.json"
RAW = (CHECKOUT / "tests/data/manifests/verity.json").read_bytes()
VALID: dict[str, Any] = json.loads(RAW)
# "Root hash" that veritysetup 2.6.1 printed for the root of this manifest.
HASH = "496f8ebaff99e4485c4a28672e5c747f35a90f16352d4bd283ef92a578da30cf"
BLOCK = 4096
needs_tool = pytest.mark.skipif(verity.find_tool() is None, reason="apt-get install cryptsetup-bin")


def encoded(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def with_verity(value: Any, size: int = VALID["root"]["size"]) -> bytes:
    return encoded(VALID | {"verity": value, "root": VALID["root"] | {"size": size}})


# --- manifests -------------------------------------------------------------------------------------


def test_a_hash_tree_is_in_the_manifest_and_in_its_digest() -> None:
    whole = decode_whole(RAW)
    assert whole.verity
    assert (whole.verity.data_size, whole.verity.root_hash) == (88547328, HASH)
    assert canonical(whole) == RAW
    # sha256sum of the file, which jq -cSj wrote
    digest = "b151f9448163b720dea2d474312fd1ceed8101166c0bea97b739e60188b3fedd"
    assert hashlib.sha256(RAW).hexdigest() == digest


def test_a_guest_gets_blocks_and_root_hash_by_its_kernel() -> None:
    image = decode_manifest(RAW)
    assert image.cmdline == f"no_timer_check vhpc.verity=21618:{HASH}"
    assert f" vhpc.verity=21618:{HASH} " in kernel_cmdline(image.cmdline, image.root_format)


def test_without_a_hash_tree_nothing_changes() -> None:
    fields = {key: value for key, value in VALID.items() if key != "verity"}
    whole = decode_whole(encoded(fields))
    assert not whole.verity
    assert canonical(whole) == encoded(fields)
    assert "verity" not in decode_manifest(encoded(fields)).cmdline


def test_an_image_is_shown_with_its_root_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = Config(images=Images(catalog=str(tmp_path), store=str(tmp_path / "store")))
    monkeypatch.setattr(options, "config", lambda: config)
    tree = {"algorithm": "sha256", "data_size": BLOCK, "root_hash": HASH}
    publish(tmp_path, "hashed", bytes(BLOCK), verity=tree)
    publish(tmp_path, "plain", bytes(BLOCK))
    assert show("hashed") == 0
    assert re.search(rf"^root hash:? +sha256:{HASH}$", capsys.readouterr().out, re.MULTILINE)
    show("plain")
    assert re.search(r"^root hash:? +-$", capsys.readouterr().out, re.MULTILINE)
    show("hashed", as_json=True)
    assert json.loads(capsys.readouterr().out)["verity"] == tree


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"algorithm": "sha512"}, "Invalid enum"),
        ({"algorithm": "crc32c"}, "Invalid enum"),
        ({"root_hash": ""}, "regex"),
        ({"root_hash": HASH[:-1]}, "regex"),
        ({"root_hash": HASH.upper()}, "regex"),
        ({"root_hash": f"{HASH[:-1]}\n"}, "regex"),
        ({"root_hash": f"{HASH} init=/x"}, "<= 64|regex"),
        ({"data_size": 0}, ">= 4096"),
        ({"data_size": -4096}, ">= 4096"),
        ({"data_size": 88547327}, "multiple of 4096"),
        ({"data_size": "88547328"}, "Expected `int`"),
        ({"data_size": 1 << 45}, "<= 17592186044416"),
        ({"salt": "00"}, "unknown field `salt`"),
    ],
)
def test_a_hostile_hash_tree_is_refused(changes: dict[str, Any], says: str) -> None:
    raw = with_verity(VALID["verity"] | changes)
    with pytest.raises(ValueError, match=says):
        decode_whole(raw)
    validator = jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text()))
    assert validator.is_valid(VALID)
    assert not validator.is_valid(json.loads(raw))


@pytest.mark.parametrize("value", [None, {}, [], False, "off", {"root_hash": HASH}])
def test_a_hash_tree_is_whole_or_absent(value: Any) -> None:
    with pytest.raises(ValueError, match=r"Expected `object`|missing required field"):
        decode_whole(with_verity(value))


@pytest.mark.parametrize("size", [1, 88547328, 89251840 - BLOCK, 89251840 + 1, 89251840 + BLOCK])
def test_a_root_is_its_data_and_its_tree(size: int) -> None:
    with pytest.raises(ValueError, match=f"root has {size} bytes, verity says 89251840"):
        decode_whole(with_verity(VALID["verity"], size))


# "Hash blocks" that veritysetup 2.6.1 printed, with --no-superblock.
@pytest.mark.parametrize(
    ("blocks", "hashes"), [(1, 0), (2, 1), (128, 1), (129, 3), (16384, 129), (16385, 132), (21618, 172)]
)
def test_trees_have_the_sizes_that_veritysetup_makes(blocks: int, hashes: int) -> None:
    assert tree_size(blocks * BLOCK) == hashes * BLOCK


def test_all_sides_cut_a_root_into_equal_blocks() -> None:
    source = (CHECKOUT / "guest/init/verity.h").read_text()
    found = re.findall(r"^#define VERITY_BLOCK (\d+)$", source, re.MULTILINE)
    assert found == ["4096"]
    assert verity.BLOCK == manifests.VERITY_BLOCK == BLOCK
    shift = re.search(r"#define VERITY_BLOCKS_MAX \(1ULL << (\d+)\)", source)
    assert shift is not None
    assert (1 << int(shift[1])) * BLOCK == manifests.ROOT_LIMIT


# --- trees -----------------------------------------------------------------------------------------


def is_intact(path: Path, made: dict[str, Any]) -> bool:
    size = made["data_size"]
    tool = verity.find_tool()
    assert tool is not None
    argv = [tool, "verify", "--no-superblock", "--hash=sha256", "--salt=-", f"--data-blocks={size // BLOCK}"]
    argv += [f"--hash-offset={size}", str(path), str(path), made["root_hash"]]
    return subprocess.run(argv, capture_output=True, check=False, timeout=60).returncode == 0


@needs_tool
@pytest.mark.parametrize("size", [1, BLOCK, BLOCK + 1, 130 * BLOCK, 130 * BLOCK + 17])
def test_a_tree_follows_whole_blocks_of_the_root(tmp_path: Path, size: int) -> None:
    data = hashlib.shake_128(b"root").digest(size)
    root, again = tmp_path / "root", tmp_path / "again"
    root.write_bytes(data)
    again.write_bytes(data)
    made = verity.append_tree(root)
    blocks = -(-size // BLOCK)
    assert made["data_size"] == blocks * BLOCK
    assert root.stat().st_size == made["data_size"] + tree_size(made["data_size"])
    assert root.read_bytes()[: made["data_size"]] == data.ljust(blocks * BLOCK, b"\0")
    assert is_intact(root, made)
    assert verity.append_tree(again) == made
    assert again.read_bytes() == root.read_bytes()


@needs_tool
@pytest.mark.parametrize("place", [0, 5 * BLOCK + 7, 299 * BLOCK, 300 * BLOCK, 303 * BLOCK + 9])
def test_no_changed_byte_is_taken_for_intact(tmp_path: Path, place: int) -> None:
    root = tmp_path / "root"
    root.write_bytes(hashlib.shake_128(b"root").digest(300 * BLOCK))
    made = verity.append_tree(root)
    data = bytearray(root.read_bytes())
    data[place] ^= 1
    root.write_bytes(data)
    assert not is_intact(root, made)


@needs_tool
def test_the_sandbox_of_imports_permits_a_hash_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """AF_ALG sockets are among what the sandbox refuses."""
    code = """
import json, pathlib, sys
sys.path.insert(0, {!r})
from vhpc_slurm.bootfiles import verity
root = pathlib.Path("/out/root.erofs")
root.write_bytes(b"x" * 4096 * 200)
json.load(sys.stdin)
print(json.dumps(dict(done=verity.append_tree(root))))
"""
    monkeypatch.setattr(sandbox, "START", code)
    source, out = tmp_path / "source.tar", tmp_path / "out"
    source.write_text("x")
    out.mkdir()
    made = sandbox.run_worker(Source.parse(str(source)), out, {}, 60.0, lambda _: None)
    assert is_intact(out / "root.erofs", made)


def test_a_tool_that_fails_refuses_the_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, tool = tmp_path / "root", tmp_path / verity.TOOL
    root.write_bytes(bytes(BLOCK))
    monkeypatch.setattr(verity, "SEARCH", str(tmp_path))
    with pytest.raises(BootFileError, match="veritysetup is missing: install the package cryptsetup-bin"):
        verity.append_tree(root)
    for script, says in (
        ("echo 'Cannot write.' >&2; exit 4", "ended with status 4: Cannot write"),
        ("true", "ended with status 0: it said nothing"),
        (f"echo 'Root hash: {HASH}'; exit 1", "ended with status 1"),
        ("kill -9 $$", "ended with status -9"),
    ):
        tool.write_text(f"#!/bin/sh\n{script}\n")
        tool.chmod(0o755)
        with pytest.raises(BootFileError, match=says):
            verity.append_tree(root)


# --- imports and saved guests ----------------------------------------------------------------------

ROOT = bytes(130 * BLOCK)
WHOLE = ROOT + bytes(3 * BLOCK)
TREE = {"algorithm": "sha256", "data_size": len(ROOT), "root_hash": "ab" * 32}


class Site:
    """A site with a kernel image whose root has a hash tree, or none."""

    def __init__(self, top: Path, *, hashed: bool) -> None:
        self.catalog, self.own, self.source = top / "site", top / "own", top / "c.tar"
        self.source.write_bytes(b"a tar")
        old = {"algorithm": "sha256", "data_size": len(ROOT), "root_hash": "cd" * 32}
        keys: dict[str, Any] = {"verity": old} if hashed else {}
        publish(self.catalog, "base", WHOLE, **keys)
        self.images = Images(catalog=str(self.catalog), import_kernel="base")
        self.asked: list[dict[str, Any]] = []
        self.said: list[str] = []
        self.tree: Any = TREE

    def worker(self, _: Source, out: Path, request: dict[str, Any], *__: object) -> dict[str, Any]:
        self.asked.append(request)
        (out / "root.erofs").write_bytes(WHOLE)
        done: dict[str, Any] = {"digest": "", "special": 0, "process": {}}
        return done | ({"verity": self.tree} if request["verity"] else {})

    def run(self) -> Manifest:
        source, ref = Source.parse(str(self.source)), ImageRef("mine")
        return self.read(import_image(self.images, source, ref, self.own, "", self.said.append).digest)

    def save(self) -> Manifest:
        base = imports.kernel_of_site(self.images, "")
        parent = Parent(base.image, base.manifest, FolderCatalog(self.catalog))
        done = save_files(
            *(self.images, lambda path: path.write_bytes(b"a tar"), parent, "job 7"),
            *(ImageRef("saved"), self.own, self.said.append),
        )
        return self.read(done.digest)

    def read(self, digest: str) -> Manifest:
        return FolderCatalog(self.own).read_manifest(digest)


def site_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, hashed: bool) -> Site:
    site = Site(tmp_path, hashed=hashed)
    monkeypatch.setattr(imports, "run_worker", site.worker)
    monkeypatch.setattr(verity, "SEARCH", str(tmp_path))
    tool = tmp_path / verity.TOOL
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    return site


@pytest.mark.promise("image.verity")
def test_new_images_have_their_own_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = site_of(tmp_path, monkeypatch, hashed=True)
    for made in (site.run(), site.save()):
        assert made.verity
        assert made.verity.root_hash == "ab" * 32
    assert [request["verity"] for request in site.asked] == [True, True]
    image = FolderCatalog(site.own).resolve(ImageRef.parse("mine"))
    assert image.manifest.cmdline.endswith(f" vhpc.verity=130:{'ab' * 32}")


def test_a_kernel_image_without_a_tree_gives_images_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = site_of(tmp_path, monkeypatch, hashed=False)
    (tmp_path / verity.TOOL).unlink()
    for made in (site.run(), site.save()):
        assert not made.verity
    assert [request["verity"] for request in site.asked] == [False, False]
    assert sum("without a hash tree of the root: base:latest was" in line for line in site.said) == 2


def test_without_veritysetup_nothing_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = site_of(tmp_path, monkeypatch, hashed=True)
    (tmp_path / verity.TOOL).unlink()
    with pytest.raises(UserError, match=r"veritysetup is missing.*cryptsetup-bin"):
        site.run()
    assert not site.asked


@pytest.mark.parametrize(
    "tree",
    [
        None,
        {},
        TREE | {"data_size": len(ROOT) - BLOCK},
        TREE | {"root_hash": "ab" * 31 + " x"},
        TREE | {"salt": ""},
    ],
)
def test_a_tree_that_the_reader_made_up_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tree: Any
) -> None:
    site = site_of(tmp_path, monkeypatch, hashed=True)
    site.tree = tree
    with pytest.raises(UserError, match="cannot publish the image mine:latest"):
        site.run()
    assert not list((site.own / "manifests/sha256").iterdir())
