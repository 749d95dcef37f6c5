# SPDX-License-Identifier: Apache-2.0
"""Images: the name a user writes, and the bytes that it means."""

from __future__ import annotations

import re
from dataclasses import dataclass

from vhpc_slurm.errors import UserError

IMAGE_NAME = re.compile(r"^[a-z0-9][a-z0-9._-]{0,63}\Z", re.ASCII)
IMAGE_TAG = re.compile(r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,63}\Z", re.ASCII)
DIGEST = re.compile(r"^sha256:[0-9a-f]{64}\Z", re.ASCII)


@dataclass(frozen=True)
class ImageRef:
    """``NAME[:TAG]`` as a user writes it; an absent tag means ``latest``."""

    name: str
    tag: str = "latest"

    def __str__(self) -> str:
        return f"{self.name}:{self.tag}"

    @classmethod
    def parse(cls, text: str) -> ImageRef:
        """Parse ``NAME[:TAG]``; UserError when a name or tag has a character it may not have."""
        name, colon, tag = text.partition(":")
        ref = cls(name, tag if colon else "latest")
        if not IMAGE_NAME.match(ref.name) or not IMAGE_TAG.match(ref.tag):
            raise UserError(
                f"--vhpc-image={text[:80]!r} is not an image name",
                "NAME[:TAG] of letters, digits, '.', '_' and '-' is expected",
                "see: vhpc image ls",
            )
        return ref


@dataclass(frozen=True)
class Blob:
    """A file of an image: its name within the image, its bytes' digest, its size in bytes."""

    file: str
    sha256: str
    size: int


@dataclass(frozen=True)
class ImageManifest:
    """What an image is.  The image's digest is the sha256 of the manifest's bytes."""

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


@dataclass(frozen=True)
class ImageIdentity:
    """The one set of bytes that a name meant when the lease was made."""

    ref: ImageRef
    digest: str
    manifest: ImageManifest
