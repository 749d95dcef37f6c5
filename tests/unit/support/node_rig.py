# SPDX-License-Identifier: Apache-2.0
"""A node's folders in a temporary one, and a small image in its catalogue."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from pathlib import Path

import msgspec
import pytest

from vhpc_slurm.config import Config
from vhpc_slurm.model import Blob, ImageIdentity, ImageManifest, ImageRef
from vhpc_slurm.node.host import process
from vhpc_slurm.node.host.accounts import Account
from vhpc_slurm.node.store.layout import Layout

GENERATION = "42.0.0123abcd"


@pytest.fixture(name="layout")
def node_layout(tmp_path: Path) -> Layout:
    paths = {"state": str(tmp_path / "state"), "run": str(tmp_path / "run"), "log": str(tmp_path / "log")}
    raw = {
        "paths": paths,
        "images": {"catalog": str(tmp_path / "catalog"), "store": str(tmp_path / "store")},
        "disks": {"folder": str(tmp_path / "disks"), "max_mib": 1024, "keep_free_mib": 0},
        "guests": {"uid_base": 4_100_000, "uid_count": 3, "uid_check_paths": []},
    }
    return Layout(msgspec.convert(raw, Config))


def publish(layout: Layout, *, damage: str = "") -> ImageIdentity:
    folder = Path(layout.config.images.catalog) / "blobs" / "sha256"
    folder.mkdir(parents=True, exist_ok=True)
    blobs = []
    for name in ("vmlinuz", "initrd", "root.erofs"):
        data = name.encode() * 1000
        digest = hashlib.sha256(data).hexdigest()
        if damage != "absent:" + name:
            flip = damage == "flip:" + name
            (folder / digest).write_bytes(
                data[:-1] + b"!" if flip else data + b"x" * (damage == "longer:" + name)
            )
        blobs.append(Blob(name, digest, len(data)))
    first, second, third = blobs
    manifest = ImageManifest(
        1,
        "tiny",
        "1",
        "x86_64",
        first,
        second,
        third,
        "erofs",
        "agent",
        "",
        64,
        "bios",
        ("virtio_blk",),
        "0.1.0",
    )
    return ImageIdentity(ImageRef("tiny", "1"), "sha256:" + "0" * 64, manifest)


def with_root(layout: Layout, data: bytes) -> ImageIdentity:
    """The image of ``publish`` with other bytes as its root."""
    image = publish(layout)
    blob = Blob("root.erofs", hashlib.sha256(data).hexdigest(), len(data))
    (Path(layout.config.images.catalog) / "blobs/sha256" / blob.sha256).write_bytes(data)
    return dataclasses.replace(image, manifest=dataclasses.replace(image.manifest, root=blob))


def account(home: str = "/home/alice") -> Account:
    return Account("alice", 2001, 2001, "", home, "/bin/bash", (("alice", 2001),))


def spawn(
    *argv: str, who: process.Credentials | None = None, generation: str = f"{os.getpid()}.0.0123abcd"
) -> process.ProcessRef:
    """Start a program of a generation (by default of this worker alone) as somebody else."""
    prefix = process.drop_to(who) if who else []
    with Path("/dev/null").open("w") as null:
        return process.spawn([*prefix, *argv], generation=generation, stderr=null.fileno())
