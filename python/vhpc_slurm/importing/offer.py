# SPDX-License-Identifier: Apache-2.0
"""An image in a registry under a name: a container, or a vhpc image."""

from __future__ import annotations

import hashlib
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from vhpc_slurm.catalog.manifest import LIMIT, InitrdBlob, KernelBlob, RootBlob, Sha256, Strict
from vhpc_slurm.errors import UserError
from vhpc_slurm.importing.fetch import registry_manifest
from vhpc_slurm.importing.sandbox import run_worker
from vhpc_slurm.importing.source import REGISTRY, Source

MEMORY_MAX = 1 << 30
"""Bytes of address space of the process that reads the registry's manifest."""
SIGNATURES_MAX = 64 << 10
"""Maximum bytes of the signatures of an image in a registry."""


class Document(Strict, frozen=True):
    """The vhpc manifest, or the signatures, in a registry."""

    media_type: str
    sha256: Sha256
    size: int


class Artifact(Strict, frozen=True):
    """A vhpc image in a registry; nothing of it was fetched yet."""

    manifest: Document
    kernel: KernelBlob
    initrd: InitrdBlob
    root: RootBlob
    signatures: Document | None = None

    @property
    def digest(self) -> str:
        """The digest of the image."""
        return f"sha256:{self.manifest.sha256}"


@dataclass(frozen=True)
class Offer:
    """An image in a registry under a name.

    Attributes:
        source: of kind ``docker``; its digest is that of the registry's manifest or index.
        image: None if it is a container.
    """

    source: Source
    image: Artifact | None

    @property
    def digest(self) -> str:
        """The digest that names it in the registry."""
        return self.source.digest


def look(source: Source, timeout_s: float) -> Offer:
    """Ask the registry of a source of kind ``docker`` what it has.

    Raises:
        UserError: it has nothing under this name, does not answer in time, or answers with other
            bytes than those of a digest; or the image is not a container and not a vhpc image.
    """
    digest = source.name.partition("@")[2]
    asked = replace(source, digest=digest) if digest else source
    raw = registry_manifest(asked.pinned, timeout_s)
    found = f"sha256:{hashlib.sha256(raw).hexdigest()}"
    if digest and found != digest:
        raise UserError(f"cannot find {source}", f"its registry has sent {found} instead of this digest")
    with tempfile.TemporaryDirectory(prefix="vhpc-") as folder:
        path, out = Path(folder, "manifest.json"), Path(folder, "out")
        path.write_bytes(raw)
        out.mkdir()
        request = {
            "max_bytes": len(raw),
            "max_files": 1,
            "max_memory": MEMORY_MAX,
            "timeout_s": int(timeout_s),
        }
        try:
            described = run_worker(Source("offer", path), out, request, timeout_s, lambda _line: None)
        except UserError as err:
            raise UserError(f"cannot use {source}", err.why, err.hint) from err
    return Offer(replace(source, digest=found), _artifact(source, described))


def refuse_image(source: Source, offer: Offer) -> None:
    """UserError, for those who import containers, if a registry offers a vhpc image."""
    if offer.image is not None:
        hint = f"use: vhpc image pull {source} [own/]NAME[:TAG]"
        raise UserError(f"cannot import {source}", "it is a vhpc image, not a container", hint)


def reference(text: str, command: str) -> Source:
    """The source ``docker://REGISTRY/NAME[:TAG][@DIGEST]``; UserError if a text has another form."""
    if not text.startswith(REGISTRY):
        hint = f"write {REGISTRY}REGISTRY/NAME[:TAG]"
        raise UserError(f"cannot {command} {text[:200]!r}", "it is not an image of a registry", hint)
    return Source.parse(text)


def _artifact(source: Source, described: dict[str, Any]) -> Artifact | None:
    """The worker's result, checked; None for a container."""
    if described == {"container": True}:
        return None
    try:
        found = msgspec.convert(described, Artifact)
    except msgspec.ValidationError as err:
        raise UserError(f"cannot use {source}", f"its manifest: {err}") from err
    for document, limit in ((found.manifest, LIMIT), (found.signatures, SIGNATURES_MAX)):
        if document is not None and document.size > limit:
            what = "vhpc manifest has" if document is found.manifest else "signatures have"
            raise UserError(f"cannot use {source}", f"its {what} more than {limit >> 10} KiB")
    return found
