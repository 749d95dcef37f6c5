# SPDX-License-Identifier: Apache-2.0
"""Containers for tests, written by the words of the OCI image specification, with none of our code."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar"
REF = "org.opencontainers.image.ref.name"


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def entry(name: str, kind: bytes = tarfile.REGTYPE, **fields: Any) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = kind
    info.mode = 0o755 if kind == tarfile.DIRTYPE else 0o644
    for key, value in fields.items():
        setattr(info, key, value)
    return info


def tar(*entries: tarfile.TarInfo | tuple[tarfile.TarInfo | str, bytes | str] | str) -> bytes:
    """A tar: a text is an empty file (a folder if it ends in /), a pair a file with content."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for item in entries:
            info, content = item if isinstance(item, tuple) else (item, b"")
            data = content.encode() if isinstance(content, str) else content
            if isinstance(info, str):
                info = entry(info.rstrip("/"), tarfile.DIRTYPE if info.endswith("/") else tarfile.REGTYPE)
            if data:
                info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


class Layout:
    """An OCI layout in a folder; ``changes`` replace keys of what it writes."""

    def __init__(self, top: Path) -> None:
        self.top = top
        (top / "blobs/sha256").mkdir(parents=True)
        (top / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
        self.entries: list[dict[str, Any]] = []

    def blob(self, data: bytes, kind: str) -> dict[str, Any]:
        (self.top / "blobs/sha256" / digest(data).removeprefix("sha256:")).write_bytes(data)
        return {"mediaType": kind, "digest": digest(data), "size": len(data)}

    def json(self, value: Any, kind: str) -> dict[str, Any]:
        return self.blob(json.dumps(value).encode(), kind)

    def image(
        self, layers: Iterable[bytes], name: str = "", *, zipped: bool = True, **changes: Any
    ) -> dict[str, Any]:
        """Write an image. ``changes``: config, manifest, configuration (its "config"), platform."""
        tars = list(layers)
        config = {
            "architecture": "amd64",
            "os": "linux",
            "config": changes.get("configuration", {}),
            "rootfs": {"type": "layers", "diff_ids": [digest(data) for data in tars]},
        } | changes.get("config", {})
        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": self.json(config, CONFIG),
            "layers": [
                self.blob(gzip.compress(data, mtime=0), f"{LAYER}+gzip") if zipped else self.blob(data, LAYER)
                for data in tars
            ],
        } | changes.get("manifest", {})
        found = self.json(manifest, MANIFEST)
        if name:
            found["annotations"] = {REF: name}
        if "platform" in changes:
            found["platform"] = changes["platform"]
        return found

    def write(self, *entries: dict[str, Any]) -> Path:
        (self.top / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": list(entries)}))
        return self.top


def as_archive(top: Path, target: Path) -> Path:
    with tarfile.open(target, "w") as archive:
        archive.add(top, ".")
    return target
