# SPDX-License-Identifier: Apache-2.0
"""The files of the lab's image: their names and sizes, on which nodes they are, and where they came from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from cluster import IMAGE, Lab

BLOBS, CATALOG = "/var/lib/vhpc/images/blobs/sha256", "/shared/vhpc/catalog"
_TOML, _PORT = "/etc/vhpc/vhpc.toml", 812


@contextmanager
def peer_port(lab: Lab, nodes: Sequence[str]) -> Iterator[None]:
    """Nodes have images.peer_port."""
    try:
        for node in nodes:
            lab.run(node, "cp", "-p", _TOML, f"{_TOML}.before")
            lab.run(node, "sed", "-i", f"s|^\\[images\\]$|&\\npeer_port = {_PORT}|", _TOML)
        yield
    finally:
        for node in nodes:
            lab.run(node, "mv", "-f", f"{_TOML}.before", _TOML, check=False)


def files(lab: Lab) -> dict[str, int]:
    """sha256 and size of the image's files, as its manifest has them, and of its chunk list."""
    digest = lab.run("ctl", "cat", f"{CATALOG}/names/{IMAGE}/latest").out.strip()
    manifest = json.loads(lab.run("ctl", "cat", f"{CATALOG}/manifests/sha256/{digest[7:]}.json").out)
    found = {manifest[part]["sha256"]: manifest[part]["size"] for part in ("kernel", "initrd", "root")}
    if "chunks" in manifest:
        count = -(-manifest["root"]["size"] // manifest["chunks"]["size"])
        found[manifest["chunks"]["sha256"]] = 32 * count
    return found


def forget(lab: Lab, node: str, names: dict[str, int]) -> None:
    lab.run(node, "rm", "-f", *(f"{BLOBS}/{name}" for name in names))


def sources(lab: Lab, job: int) -> dict[str, dict[str, int]]:
    """Bytes by source, for each node, as `vhpc timeline` shows them."""
    found = {}
    for one in lab.vhpc("ctl", "timeline", str(job))["nodes"]:
        for stage in one["stages"]:
            if stage["name"] == "image sources":
                pairs = (pair.split() for pair in stage["detail"].split(", "))
                found[one["node"]] = {source: int(size) for source, size in pairs}
    return found
