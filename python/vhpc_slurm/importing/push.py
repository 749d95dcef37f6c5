# SPDX-License-Identifier: Apache-2.0
"""Puts an image of a catalogue into a registry, as an OCI artifact, with skopeo."""

from __future__ import annotations

import hashlib
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vhpc_slurm.catalog import FolderCatalog, blobs
from vhpc_slurm.catalog.armour import split
from vhpc_slurm.catalog.changes import check_owner
from vhpc_slurm.catalog.manifest import Manifest, decode_whole
from vhpc_slurm.config.images import Images
from vhpc_slurm.errors import UserError
from vhpc_slurm.importing import artifact
from vhpc_slurm.importing.fetch import checked, reason, registry_manifest, skopeo
from vhpc_slurm.importing.offer import reference
from vhpc_slurm.importing.sandbox import call_filter
from vhpc_slurm.model import Blob, ImageIdentity
from vhpc_slurm.progress import counter

WRITTEN_MAX = 64 << 20
"""Bytes of a file that skopeo may write while it pushes."""
POLL_S, PROGRESS_S = 0.1, 10.0


@dataclass(frozen=True)
class Pushed:
    """An image that was pushed.

    Attributes:
        image: its name in the catalogue.
        digest: of the image.
        reference: where it is now.
        registry_digest: the digest that names it in the registry.
        size: bytes of kernel, initrd and root.
        signatures: their number.
    """

    image: str
    digest: str
    reference: str
    registry_digest: str
    size: int
    signatures: int


def push(
    images: Images, image: ImageIdentity, catalog: FolderCatalog, text: str, progress: Callable[[str], None]
) -> Pushed:
    """Push an image of a catalogue.

    Args:
        images: the site's configuration.
        image: the image, from ``catalog``.
        catalog: the catalogue that has it.
        text: ``docker://REGISTRY/NAME[:TAG]``.
        progress: gets a line for each step.

    Raises:
        UserError: the image is broken, or the registry refuses it or is too slow.
        FabricError: the catalogue cannot be read.
    """
    source = reference(text, "push to")
    if "@" in source.name:
        hint = "write docker://REGISTRY/NAME[:TAG]"
        raise UserError(f"cannot push to {source}", "the registry computes the digest", hint)
    what = checked(source.name)
    check_owner(catalog.path, "push from")
    signed = catalog.read_signed(image)
    manifest = decode_whole(signed.manifest)
    parts = blobs(image.manifest)
    progress(f"checking {image.ref.label}")
    count = counter(progress, "checked", sum(blob.size for blob in parts))
    for blob in parts:
        catalog.verify_blob(blob, str(image.ref), count)
    signatures = split(signed.signatures)
    kinds = [part.media_type for part in (manifest.kernel, manifest.initrd, manifest.root)]
    described = [(kind, blob.sha256, blob.size) for kind, blob in zip(kinds, parts, strict=True)]
    with tempfile.TemporaryDirectory(prefix="vhpc-") as name:
        folder = Path(name)
        digest = artifact.write_layout(
            folder, signed.manifest, described, b"".join(signatures), _notes(manifest)
        )
        progress(f"pushing to {what}: {sum(blob.size for blob in parts) >> 20} MiB")
        _upload(folder, catalog, parts, what, images.import_timeout_s, progress)
    found = f"sha256:{hashlib.sha256(registry_manifest(source.name, images.import_timeout_s)).hexdigest()}"
    if found != digest:
        why = f"the registry has {found} under this name instead of {digest}"
        raise UserError(f"cannot push to {what}", why, "it changes manifests, or somebody else has pushed")
    size = sum(blob.size for blob in parts)
    return Pushed(image.ref.label, image.digest, what, digest, size, len(signatures))


def _notes(manifest: Manifest) -> dict[str, str]:
    """Annotations of the OCI image specification, for people who look at the registry."""
    notes = {
        "org.opencontainers.image.created": manifest.provenance.created,
        "org.opencontainers.image.description": manifest.description,
    }
    return {key: text for key, text in notes.items() if text}


def _upload(
    folder: Path,
    catalog: FolderCatalog,
    parts: tuple[Blob, ...],
    what: str,
    timeout_s: float,
    progress: Callable[[str], None],
) -> None:
    """Let skopeo copy the layout in a folder, with blobs of a catalogue; errors as ``push``."""
    shown = {f"blobs/sha256/{blob.sha256}": catalog.blob_path(blob) for blob in parts}
    # the site's policy is for what is fetched, and may refuse folders
    command = ("copy", "--quiet", "--preserve-digests", "oci:/out", what)
    options = ("--insecure-policy",)
    start = told = time.monotonic()
    with tempfile.TemporaryFile() as said, call_filter(network=True) as seccomp:
        argv = skopeo(seccomp, folder, WRITTEN_MAX, *command, shown=shown, options=options)
        with subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=said, stderr=said, pass_fds=[seccomp]
        ) as run:
            try:
                while run.poll() is None:
                    time.sleep(POLL_S)
                    now = time.monotonic()
                    if now - start > timeout_s:
                        hint = "images.import_timeout_s is the limit"
                        raise UserError(f"cannot push to {what}", "it took too long", hint)
                    if now - told >= PROGRESS_S:
                        progress(f"pushing for {now - start:.0f} s")
                        told = now
            finally:
                run.kill()
        if run.returncode != 0:
            raise UserError(f"cannot push to {what}", reason(said, "skopeo failed"))
