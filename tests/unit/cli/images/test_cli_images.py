# SPDX-License-Identifier: Apache-2.0
"""vhpc image: what users and operators see of a catalogue, and what they change in it."""

from __future__ import annotations

import getpass
import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from site_catalog import ARM, publish
from vhpc_command import Vhpc

DATA = Path(__file__).parents[3] / "data/manifests"
DIGEST = "sha256:e07365e21d5b6b08114ad620a66e32f75f852c4fbb7ea7c9cd5fd1db45ce1216"


@pytest.fixture(name="vhpc")
def vhpc_with_cuda(vhpc: Vhpc) -> Vhpc:
    """The command, and cuda:12.8, whose blobs are absent."""
    top = vhpc.folder / "catalog"
    (top / f"manifests/sha256/{DIGEST[7:]}.json").write_bytes((DATA / "manifest.json").read_bytes())
    (top / "names/cuda").mkdir()
    (top / "names/cuda/12.8").write_text(f"{DIGEST}\n")
    return vhpc


def test_show_has_all_that_a_manifest_says(vhpc: Vhpc) -> None:
    text = vhpc("image", "show", "cuda:12.8")
    shown = {" ".join(line.split()[:2]): line for line in text.splitlines()}
    assert DIGEST in text
    assert shown["min CPUs"].split()[-1] == "2"
    assert "nvidia 570.86.15" in text
    assert "docker://registry.example/cuda:12.8 sha256:2222" in text
    assert "site/owner=hpc-support" in text
    assert "CUDA_VERSION=12.8" in text
    assert "application/vnd.vhpc.root.erofs" in text
    assert "\x07" not in text, "control characters of the environment do not reach the terminal"


def test_show_as_json_is_the_manifest_with_digest_and_size(vhpc: Vhpc) -> None:
    shown = vhpc.json("image", "show", "cuda:12.8")
    manifest = json.loads((DATA / "manifest.json").read_text())
    assert {key: shown[key] for key in manifest} == manifest
    assert (shown["image"], shown["digest"], shown["here"]) == ("cuda:12.8", DIGEST, False)
    assert shown["size"] == 57575096 + 3739648 + 88539136


def test_show_finds_an_image_by_its_digest(vhpc: Vhpc) -> None:
    assert vhpc.json("image", "show", f"anything@{DIGEST}")["digest"] == DIGEST
    vhpc("image", "show", f"cuda@sha256:{'0' * 64}", code=1)
    assert "has no image of this digest: it is mistyped" in vhpc.error


def test_a_name_with_two_architectures_is_listed_with_both(vhpc: Vhpc) -> None:
    assert "ARCH" not in vhpc("image", "ls")
    top = vhpc.folder / "catalog"
    arm = publish(top, "arm", b"root", **ARM)
    (top / "names/cuda/12.8").write_text(f"{DIGEST}\n{arm} aarch64\n")
    rows = [line.split()[:2] for line in vhpc("image", "ls", "cuda").splitlines()]
    assert rows == [["IMAGE", "ARCH"], ["cuda:12.8", "aarch64"], ["cuda:12.8", "x86_64"]]
    vhpc("image", "show", "cuda:12.8", code=1)
    assert f"choose one: cuda:12.8@{arm} (aarch64), cuda:12.8@{DIGEST} (x86_64)" in vhpc.error
    assert vhpc.json("image", "show", f"cuda:12.8@{arm}")["arch"] == "aarch64"


def test_names_of_the_users_own_catalogue_are_mentioned(vhpc: Vhpc, tmp_path: Path) -> None:
    """In a line on stderr: the list itself stays the site's."""
    name, own = getpass.getuser(), tmp_path / "own"
    config = Path(os.environ["VHPC_CONFIG"])
    text = config.read_text()
    config.write_text(text.replace("[images]", f'[images]\nuser_catalog = "{own}/{{user}}"'))
    listed = vhpc("image", "ls")
    assert vhpc.error == ""
    (own / name / "names/mine").mkdir(parents=True)
    (own / name / "names/mine/1").write_text(DIGEST)
    assert vhpc("image", "ls") == listed
    assert vhpc.error == "vhpc: 1 image of your own is not in this list, see: vhpc image ls --own\n"
    for command in (("image", "show", "mine"), ("image", "ls", "mine"), ("image", "diff", "mine", "cuda")):
        vhpc(*command, code=1)
        assert "image mine:latest is unknown (did you mean own/mine:1? " in vhpc.error
    vhpc("image", "show", "own/tiny", code=1)
    assert "image own/tiny:latest is unknown (did you mean tiny:1? " in vhpc.error


def test_tag_and_rm_change_names(vhpc: Vhpc) -> None:
    assert vhpc("image", "tag", "tiny:1", "tiny").startswith("tiny:latest sha256:")
    made = vhpc.json("image", "tag", f"cuda@{DIGEST}", "cuda")
    assert made == {"image": "cuda:latest", "digest": DIGEST}
    assert [row["image"] for row in vhpc.json("image", "ls", "cuda")] == ["cuda:12.8", "cuda:latest"]
    assert vhpc("image", "rm", "cuda", "tiny").splitlines()[0] == f"removed cuda:latest ({DIGEST})"
    assert [row["image"] for row in vhpc.json("image", "ls", "cuda")] == ["cuda:12.8"]
    (row,) = vhpc.json("image", "rm", "cuda:12.8")
    assert row == {"image": "cuda:12.8", "digest": DIGEST}


def test_rm_removes_all_names_or_none(vhpc: Vhpc) -> None:
    vhpc("image", "rm", "cuda:12.8", "no-such-image", code=1)
    assert "no image no-such-image:latest" in vhpc.error
    assert vhpc.json("image", "ls", "cuda")[0]["image"] == "cuda:12.8"


def test_verify_reads_all_bytes_and_names_broken_images(vhpc: Vhpc) -> None:
    assert vhpc("image", "verify", "tiny:1").splitlines()[1].endswith("ok")
    rows = {row["image"]: row["problem"] for row in vhpc.json("image", "verify", code=1)}
    assert rows["tiny:1"] is None
    assert "no manifest" in rows["tiny:broken"]
    assert "kernel: the catalogue has no blob" in rows["cuda:12.8"]
    root = max((vhpc.folder / "catalog/blobs/sha256").iterdir(), key=lambda path: path.stat().st_size)
    root.write_bytes(root.read_bytes()[:-1] + b"!")
    assert "root: expected sha256:" in vhpc.json("image", "verify", "tiny:1", code=1)[0]["problem"]
    root.unlink()
    os.mkfifo(root)
    assert "not a regular file" in vhpc.json("image", "verify", "tiny:1", code=1)[0]["problem"]


def test_verify_reads_the_chunk_list(vhpc: Vhpc) -> None:
    catalog, data, size = vhpc.folder / "catalog", os.urandom(200_000), 1 << 16
    hashes = b"".join(hashlib.sha256(data[at : at + size]).digest() for at in range(0, len(data), size))
    listed = hashlib.sha256(hashes).hexdigest()
    publish(catalog, "listed", data, chunks={"sha256": listed, "size": size})
    path = catalog / "blobs/sha256" / listed
    (row,) = vhpc.json("image", "verify", "listed", code=1)
    assert row["problem"].startswith(
        "image listed:latest is broken: chunk list of root: the catalogue has no blob"
    )
    path.write_bytes(hashes[:-1] + b"!")
    (row,) = vhpc.json("image", "verify", "listed", code=1)
    assert f"chunk list of root: expected sha256:{listed}" in row["problem"]
    path.write_bytes(hashes)
    assert vhpc.json("image", "verify", "listed")[0]["problem"] is None


def test_gc_lists_deleted_and_kept_images(vhpc: Vhpc) -> None:
    vhpc("image", "rm", "tiny:broken")
    vhpc("image", "rm", "tiny:1")
    text = vhpc("image", "gc", "--dry-run")
    assert re.search(r"^kept for (6d23h|7d00h): sha256:\w{64}, which has no name$", text, re.M)
    assert text.splitlines()[-1] == "0 B would be freed"
    found = vhpc.json("image", "gc", "--days", "0")
    assert [item["kind"] for item in found["removed"]] == ["manifest", "blob", "blob", "blob"]
    assert found["freed"] > 1024 + 512 + 2048
    assert (found["waiting"], found["broken"], found["dry_run"]) == ([], [], False)
    assert vhpc.json("image", "ls") == vhpc.json("image", "ls", "cuda")


def test_gc_with_a_broken_manifest_deletes_no_blob(vhpc: Vhpc) -> None:
    path = vhpc.folder / f"catalog/manifests/sha256/{DIGEST[7:]}.json"
    path.write_bytes(b"{}")
    vhpc("image", "rm", "tiny:1")
    text = vhpc("image", "gc", "--days", "0", code=1)
    assert f"no blob is deleted, because one may need it: image {DIGEST} is broken" in text
    assert "deleted: blob" not in text


def test_another_catalogue_is_named_by_an_option(vhpc: Vhpc) -> None:
    other = vhpc.folder / "other"
    (vhpc.folder / "catalog").rename(other)
    assert vhpc.json("image", "ls") == []
    assert len(vhpc.json("image", "ls", "--catalog", str(other))) == 3
    vhpc("image", "tag", "--catalog", str(other), "cuda:12.8", "cuda")
    assert (other / "names/cuda/latest").read_text() == f"{DIGEST}\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="run as root: the test takes the rights of another user")
def test_an_ordinary_user_changes_only_the_own_catalogue(vhpc: Vhpc, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="vhpc-catalog-") as top:
        Path(top).chmod(0o755)
        others, own = Path(top, "others"), Path(top, "own")
        for folder in (others, own):
            shutil.copytree(vhpc.folder / "catalog", folder)
        shutil.copyfile(os.environ["VHPC_CONFIG"], Path(top, "vhpc.toml"))
        monkeypatch.setenv("VHPC_CONFIG", str(Path(top, "vhpc.toml")))
        subprocess.run(["chown", "-R", "65534:65534", own], check=True)
        vhpc("image", "ls", "--catalog", top)  # imports what only root may read on this machine
        vhpc("image", "rm", "--catalog", str(own), "cuda:12.8", code=1)
        assert "belongs to uid 65534" in vhpc.error
        os.seteuid(65534)
        try:
            vhpc("image", "rm", "--catalog", str(others), "cuda:12.8", code=1)
            assert vhpc.error.startswith(
                f"vhpc: cannot change the image catalogue {others}: Permission denied"
            )
            assert vhpc.json("image", "rm", "--catalog", str(own), "cuda:12.8")[0]["digest"] == DIGEST
            assert vhpc.json("image", "verify", "--catalog", str(own), "tiny:1")[0]["problem"] is None
        finally:
            os.seteuid(0)
        assert (others / "names/cuda/12.8").exists()


def test_an_image_does_not_differ_from_itself(vhpc: Vhpc) -> None:
    assert vhpc("image", "diff", "tiny:1", "tiny:1") == "no difference\n"
    assert vhpc.json("image", "diff", "tiny:1", "tiny:1")["files"] == []


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("push", "tiny:1", "registry/a"), "it is not an image of a registry"),
        (("push", "none", "docker://127.0.0.1:1/a"), "image none:latest is unknown"),
        (("pull", "docker://127.0.0.1:1/a", "mine"), "connection refused"),
        (("pull", "docker://127.0.0.1:1/a", f"mine@sha256:{'0' * 64}"), "cannot be a new name"),
        (("pull", "docker://127.0.0.1:1/a", "own/mine"), "images.user_catalog is not set"),
        (("pull", "oci:/a", "mine"), "it is not an image of a registry"),
        (("diff", "tiny:1", "own/mine"), "images.user_catalog is not set"),
        (("diff", "tiny:1", "tiny:2"), "image tiny:2 is unknown"),
    ],
)
def test_a_mistake_about_registries_is_one_line(vhpc: Vhpc, words: tuple[str, ...], says: str) -> None:
    vhpc("image", *words, code=1)
    assert says in vhpc.error
