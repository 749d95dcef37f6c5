# SPDX-License-Identifier: Apache-2.0
"""vhpc doctor: what it says about images, and about hosts where users import them."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import msgspec
import pytest
from doctor_rig import executable
from site_catalog import publish

from vhpc_slurm.cli.host.checks import Level, images, imagestore, peers
from vhpc_slurm.config import Config
from vhpc_slurm.config.images import Images


def config(catalog: Path, kernel: str = "base") -> Config:
    return Config(images=Images(catalog=str(catalog), import_kernel=kernel))


def test_the_kernel_of_imports_must_be_there(tmp_path: Path) -> None:
    assert list(images.import_kernel(config(tmp_path, ""))) == []
    publish(tmp_path, "base", b"root")
    (found,) = images.import_kernel(config(tmp_path))
    assert (found.level, found.hint[:22]) == (Level.WARN, "build that image again")
    assert found.what == "the root of base:latest has no hash tree, so roots of imports have none"
    tree = {"algorithm": "sha256", "data_size": 4096, "root_hash": "0" * 64}
    publish(tmp_path, "base", bytes(4096), verity=tree)
    (found,) = images.import_kernel(config(tmp_path))
    assert (found.level, found.what) == (Level.OK, "imports get the kernel of base:latest")
    (found,) = images.import_kernel(config(tmp_path, "bose"))
    assert found.level is Level.ERROR
    assert found.what.startswith("image bose:latest is unknown (did you mean base:latest?")
    (found,) = images.import_kernel(config(tmp_path, "../x"))
    assert found.level is Level.ERROR


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("zstd", "skopeo", "veritysetup"):
        executable(folder / name, "true")
    executable(folder / "mkfs.erofs", "echo ' --tar=X  generate a full image from a tarball'")
    executable(folder / "bwrap", "echo works")
    monkeypatch.setattr(images, "SEARCH", f"{folder}:/bin")
    monkeypatch.setattr("shutil.which", lambda name, path: (folder / name).exists() or None)
    return folder


def test_a_host_can_import_or_names_the_missing_parts(tmp_path: Path, tools: Path) -> None:
    def found() -> tuple[Level, str]:
        one = next(iter(images.import_tools(config(tmp_path))))
        return one.level, one.what + " " + one.hint

    assert list(images.import_tools(config(tmp_path, ""))) == []
    assert found() == (Level.OK, "users can import containers here ")
    disks = [one.what for one in images.import_tools(config(tmp_path)) if one.check == "images.import_disks"]
    assert disks == ["users cannot import disk images here: qemu-utils qemu-system-x86 is missing"]
    for name in ("qemu-img", "qemu-system-x86_64"):
        executable(tools / name, "true")
    assert [one.level for one in images.import_tools(config(tmp_path))] == [Level.OK, Level.OK]
    # what mkfs.erofs 1.5 prints
    executable(tools / "mkfs.erofs", "echo 'usage: [options] FILE DIRECTORY' >&2; exit 1")
    assert found()[0] is Level.WARN
    assert "mkfs.erofs does not read tars" in found()[1]
    executable(tools / "mkfs.erofs", "echo --tar=X")
    executable(tools / "bwrap", "echo 'bwrap: setting up uid map: Permission denied' >&2; exit 1")
    assert "bwrap does not work" in found()[1]
    # what 0.4 of RHEL 9 says
    executable(tools / "bwrap", "echo 'bwrap: Unknown option --disable-userns' >&2; exit 1")
    assert "install bubblewrap 0.8 or newer" in found()[1]
    for name in ("skopeo", "bwrap", "veritysetup"):
        (tools / name).unlink()
    packages = "bubblewrap cryptsetup-bin skopeo"
    assert f"{packages} is missing apt install {packages}" in found()[1]


def test_broken_images_of_a_catalogue_are_named(tmp_path: Path) -> None:
    assert images.catalogue(config(tmp_path / "none")).level is Level.ERROR
    assert "has no images" in images.catalogue(config(tmp_path)).what
    publish(tmp_path, "base", b"root")
    assert images.catalogue(config(tmp_path)).what == f"{tmp_path} has 1 images"
    (tmp_path / "names/base/latest").write_text(json.dumps("x"))
    assert "its name file has no digest" in images.catalogue(config(tmp_path)).what


def test_the_port_of_peers_is_tried_and_their_names_resolved() -> None:
    def found(port: int, names: str = "{node}") -> list[tuple[Level, str]]:
        config = Config(images=Images(peer_port=port, peer_names=names))
        return [(one.level, one.what) for one in peers.check(config, "localhost", root=True)]

    assert found(0) == []
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        warned, refused = found(port)
    assert warned == (
        Level.WARN,
        f"any user of a node can take port {port}, and its jobs then read the catalogue",
    )
    assert refused == (Level.ERROR, f"port {port} cannot be listened on: Address already in use")
    assert found(port)[1] == (Level.OK, f"other nodes ask localhost for images at port {port}")
    (_, unknown) = found(port, "{node}.invalid")
    assert unknown[0] is Level.ERROR
    assert "localhost.invalid of this node has no address" in unknown[1]


def test_the_store_of_a_node_is_compared_with_the_largest_image(tmp_path: Path) -> None:
    def found(**limits: int) -> tuple[Level, str]:
        paths = {"catalog": str(tmp_path / "catalog"), "store": str(tmp_path / "store")}
        one = imagestore.check(msgspec.convert({"images": {**paths, **limits}}, Config))
        return one.level, one.what

    publish(tmp_path / "catalog", "small", b"root")
    publish(tmp_path / "catalog", "large", bytes(3 << 20))
    level, text = found()
    assert (level, text.partition(" does")[2]) == (Level.OK, " not exist yet: the first job makes it")
    (tmp_path / "store/blobs/sha256").mkdir(parents=True)
    level, text = found(store_max_mib=10)
    assert (level, text) == (
        Level.OK,
        f"{tmp_path}/store may have 10 MiB of images, and has room for 10 MiB more",
    )
    level, text = found(store_max_mib=2)
    assert level is Level.WARN
    assert text.endswith("2 MiB more, but image large:latest has 3 MiB: its jobs fail here")
    level, text = found(store_max_mib=1 << 32)
    assert level is Level.WARN
    assert text.endswith(f"less than images.store_max_mib = {1 << 32}")
    (tmp_path / "store/blobs/sha256" / ("a" * 64)).write_bytes(bytes(9 << 20))
    assert found(store_max_mib=10)[0] is Level.OK, "no job uses that file"
    (tmp_path / "store/pins/b").mkdir(parents=True)
    (tmp_path / "store/pins/b/1.0.0123abcd").write_text(f"{'a' * 64}\n" * 3)
    level, text = found(store_max_mib=10)
    assert level is Level.WARN
    assert text.endswith("; jobs with image large:latest, 3 MiB, are requeued here until there is space")
