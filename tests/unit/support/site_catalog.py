# SPDX-License-Identifier: Apache-2.0
"""A catalogue with images, written by the words of docs/image-format.md."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from vhpc_slurm.catalog import FolderCatalog, blobs

BASE = json.loads((Path(__file__).parents[2] / "data/manifests/manifest.json").read_text())
ARM: dict[str, Any] = {
    "arch": "aarch64",
    "kernel": BASE["kernel"] | {"media_type": "application/vnd.vhpc.kernel.image"},
}
"""Keys of an image for aarch64."""


def publish(catalog: Path, name: str, root: bytes, *, tag: str = "latest", **keys: Any) -> str:
    """Write an image by the words of docs/image-format.md; kernel and initrd are those of all images.

    ``keys`` are further keys of the manifest.
    """
    fields = BASE | keys
    for part, data in (("kernel", b"kernel"), ("initrd", b"initrd"), ("root", root)):
        sha256 = hashlib.sha256(data).hexdigest()
        fields[part] = fields[part] | {"sha256": sha256, "size": len(data)}
        (catalog / "blobs/sha256").mkdir(parents=True, exist_ok=True)
        (catalog / "blobs/sha256" / sha256).write_bytes(data)
    raw = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    digest = hashlib.sha256(raw).hexdigest()
    (catalog / "manifests/sha256").mkdir(parents=True, exist_ok=True)
    (catalog / f"manifests/sha256/{digest}.json").write_bytes(raw)
    (catalog / "names" / name).mkdir(parents=True, exist_ok=True)
    (catalog / "names" / name / tag).write_text(f"sha256:{digest}\n")
    return f"sha256:{digest}"


def whole(catalog: Path) -> list[str]:
    """Names whose images are whole; fails if a name has an image that is not."""
    names = []
    for entry in FolderCatalog(catalog).images():
        assert entry.identity is not None, entry.problem
        for blob in blobs(entry.identity.manifest):
            FolderCatalog(catalog).verify_blob(blob, str(entry.ref))
        names.append(str(entry.ref))
    return names
