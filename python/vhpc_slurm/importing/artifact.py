# SPDX-License-Identifier: Apache-2.0
"""The form that a vhpc image has in a registry: an OCI artifact (docs/image-format.md).

It is an OCI image manifest (OCI image specification 1.1, "Guidelines for Artifact Usage") whose
configuration is the vhpc manifest, byte for byte, and whose layers are kernel, initrd, root
and, if there are any, the signatures. Standard library only: the sandbox reads manifests of registries
with this module.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vhpc_slurm.importing.tree import RefusedError

MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
VENDOR = "application/vnd.vhpc."
ARTIFACT_TYPE = f"{VENDOR}image.v1"
CONFIG_TYPE = f"{VENDOR}manifest.v1+json"
SIGNATURES_TYPE = f"{VENDOR}signatures.v1+openssh"
PARTS = ("kernel", "initrd", "root")
"""Layers by the start of their media types: ``application/vnd.vhpc.kernel.`` and so on."""
DIGEST = re.compile(r"sha256:([0-9a-f]{64})\Z", re.ASCII)
CONTAINER_CONFIGS = {
    "application/vnd.oci.image.config.v1+json",
    "application/vnd.docker.container.image.v1+json",
}
INDEXES = {INDEX_TYPE, "application/vnd.docker.distribution.manifest.list.v2+json"}
LAYERS_MAX = 4
MANIFEST_MAX = 4 << 20


def write_layout(
    folder: Path,
    manifest: bytes,
    blobs: Iterable[tuple[str, str, int]],
    signatures: bytes,
    notes: dict[str, str],
) -> str:
    """Write an OCI image layout of an image, without the files of kernel, initrd and root.

    The same image with the same signatures gives the same bytes.

    Args:
        folder: an empty folder.
        manifest: the bytes of the vhpc manifest.
        blobs: media type, sha256 and size of kernel, initrd and root.
        signatures: of the manifest, in the text form of OpenSSH; may be empty.
        notes: annotations, for people.

    Returns:
        the digest that names the image in registries.
    """
    (folder / "blobs/sha256").mkdir(parents=True)
    layers = [_descriptor(kind, sha256, size) for kind, sha256, size in blobs]
    if signatures:
        layers.append(_write(folder, SIGNATURES_TYPE, signatures))
    config = _write(folder, CONFIG_TYPE, manifest)
    fields = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "artifactType": ARTIFACT_TYPE,
        "config": config,
        "layers": layers,
    }
    if notes:
        fields["annotations"] = notes
    entry = _write(folder, MANIFEST_TYPE, _json(fields))
    (folder / "oci-layout").write_bytes(_json({"imageLayoutVersion": "1.0.0"}))
    (folder / "index.json").write_bytes(
        _json({"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": [entry]})
    )
    return str(entry["digest"])


def describe(path: Path) -> dict[str, Any]:
    """The parts of the image that a registry's manifest describes.

    Returns:
        ``{"container": True}``; or, of a vhpc image, media type, sha256 and size of its ``manifest``,
        ``kernel``, ``initrd``, ``root`` and, if it has some, ``signatures``.

    Raises:
        RefusedError: it is neither, or damaged.
    """
    with path.open("rb") as file:
        raw = file.read(MANIFEST_MAX + 1)
    if len(raw) > MANIFEST_MAX:
        raise RefusedError(f"its manifest has more than {MANIFEST_MAX >> 20} MiB")
    try:
        fields = json.loads(raw)
    except (ValueError, RecursionError) as err:
        raise RefusedError(f"its manifest is not JSON: {err}") from err
    if not isinstance(fields, dict):
        raise RefusedError("its manifest is not a JSON object")
    if str(fields.get("mediaType")) in INDEXES or ("manifests" in fields and "config" not in fields):
        return {"container": True}
    config = fields.get("config")
    of_config = config.get("mediaType") if isinstance(config, dict) else None
    kinds = [str(kind) for kind in (fields.get("artifactType"), of_config) if kind]
    ours = [kind for kind in kinds if kind.startswith(VENDOR)]
    if not ours:
        if not of_config or str(of_config) in CONTAINER_CONFIGS:  # none: docker's schema 1
            return {"container": True}
        raise RefusedError(f"it is neither a container nor a vhpc image, but of type {kinds[0][:100]!r}")
    if ours[0] not in {ARTIFACT_TYPE, CONFIG_TYPE}:
        raise RefusedError(f"it is of type {ours[0][:100]!r}, this vhpc knows {ARTIFACT_TYPE}")
    return _parts(fields)


def _parts(fields: dict[str, Any]) -> dict[str, Any]:
    """The parts of a vhpc image by their names."""
    found = {"manifest": _part(fields.get("config"), "its vhpc manifest")}
    if found["manifest"]["media_type"] != CONFIG_TYPE:
        kind = found["manifest"]["media_type"][:100]
        raise RefusedError(f"its vhpc manifest is of type {kind!r}, this vhpc knows {CONFIG_TYPE}")
    layers = fields.get("layers")
    if not isinstance(layers, list) or len(layers) > LAYERS_MAX:
        raise RefusedError("it has no list of kernel, initrd, root and signatures")
    for entry in layers:
        part = _part(entry, "a layer")
        kind = part["media_type"]
        name = next((name for name in PARTS if kind.startswith(f"{VENDOR}{name}.")), "")
        name = "signatures" if kind == SIGNATURES_TYPE else name
        if not name or name in found:
            raise RefusedError(f"it has {'two layers' if name else 'a layer'} of type {kind[:100]!r}")
        found[name] = part
    for name in PARTS:
        if name not in found:
            raise RefusedError(f"it has no {name}")
    return found


def _part(entry: Any, what: str) -> dict[str, Any]:
    """Media type, sha256 and size of a descriptor (OCI image specification, "OCI Content Descriptors")."""
    if not isinstance(entry, dict):
        raise RefusedError(f"{what} has no descriptor")
    digest = DIGEST.match(str(entry.get("digest")))
    if digest is None:
        raise RefusedError(f"{what} has no sha256 digest")
    size, kind = entry.get("size"), entry.get("mediaType")
    if type(size) is not int or size < 1:
        raise RefusedError(f"{what} has no size")
    if not isinstance(kind, str):
        raise RefusedError(f"{what} has no media type")
    return {"media_type": kind, "sha256": digest[1], "size": size}


def _write(folder: Path, kind: str, data: bytes) -> dict[str, Any]:
    sha256 = hashlib.sha256(data).hexdigest()
    (folder / "blobs/sha256" / sha256).write_bytes(data)
    return _descriptor(kind, sha256, len(data))


def _descriptor(kind: str, sha256: str, size: int) -> dict[str, Any]:
    return {"mediaType": kind, "digest": f"sha256:{sha256}", "size": size}


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
