# SPDX-License-Identifier: Apache-2.0
"""Images: the name a user writes, and the bytes that it means."""

from __future__ import annotations

import re

from vhpc_slurm.errors import UserError
from vhpc_slurm.record import Record

IMAGE_NAME = re.compile(r"^[a-z0-9][a-z0-9._-]{0,63}\Z", re.ASCII)
IMAGE_TAG = re.compile(r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,63}\Z", re.ASCII)
OWN = "own/"
"""Before the name of an image in the user's own catalogue."""
DIGEST = re.compile(r"^sha256:[0-9a-f]{64}\Z", re.ASCII)


class ImageRef(Record, frozen=True):
    """``[own/]NAME[:TAG][@sha256:DIGEST]`` as a user writes it; an absent tag means ``latest``.

    With a ``digest`` it means the image of that digest, whatever the name points to.
    ``own``: it is in the user's own catalogue, not in the site's.
    """

    name: str
    tag: str = "latest"
    digest: str = ""
    own: bool = False

    def __str__(self) -> str:
        return f"{self.label}@{self.digest}" if self.digest else self.label

    @property
    def label(self) -> str:
        """``[own/]NAME:TAG``."""
        return f"{OWN if self.own else ''}{self.name}:{self.tag}"

    @classmethod
    def parse(cls, text: str) -> ImageRef:
        """Parse ``[own/]NAME[:TAG][@sha256:DIGEST]``; UserError if it has another form."""
        label, at, digest = text.removeprefix(OWN).partition("@")
        name, colon, tag = label.partition(":")
        ref = cls(name, tag if colon else "latest", digest, own=text.startswith(OWN))
        is_pinned_well = DIGEST.match(digest) if at else True
        if not IMAGE_NAME.match(ref.name) or not IMAGE_TAG.match(ref.tag) or not is_pinned_well:
            raise UserError(
                f"--vhpc-image={text[:160]!r} is not an image name",
                "NAME[:TAG] of letters, digits, '.', '_' and '-' is expected, or NAME[:TAG]@sha256:DIGEST",
                "see: vhpc image ls",
            )
        return ref


class Blob(Record, frozen=True):
    """A file of an image: its name within the image, its bytes' digest, its size in bytes.

    ``chunks`` is the digest of its chunk list (``vhpc_slurm.chunks``), whose chunks have ``chunk_size``
    bytes; empty: it has none.
    """

    file: str
    sha256: str
    size: int
    chunks: str = ""
    chunk_size: int = 0


class ImageManifest(Record, frozen=True):
    """The parts of an image's manifest that a lease carries.  The image's digest is the sha256 of the
    manifest.

    A manifest has no name: the image was found by ``name`` and ``tag``.
    ``min_cpus`` are CPUs as Slurm counts them (hardware threads).  ``driver_versions`` has the
    drivers whose module states a version.
    """

    schema: int
    name: str
    tag: str
    arch: str
    kernel: Blob
    initrd: Blob
    root: Blob
    root_format: str
    init: str
    cmdline: str
    min_memory_mib: int
    firmware: str
    drivers: tuple[str, ...]
    agent_version: str
    description: str = ""
    created: str = ""
    signature: str | None = None
    min_cpus: int = 1
    driver_versions: tuple[tuple[str, str], ...] = ()


class ImageIdentity(Record, frozen=True):
    """The one set of bytes that a name meant when the lease was made."""

    ref: ImageRef
    digest: str
    manifest: ImageManifest

    def __str__(self) -> str:
        """``[own/]NAME:TAG@sha256:DIGEST``: what was asked for, and what it was."""
        return f"{self.ref.label}@{self.digest}"
