# SPDX-License-Identifier: Apache-2.0
"""Catalogues that are folders, read with the rights of this process: the site's, or its user's own.

Each blob is verified before use (by ``verify_blob`` here, or while the node's store copies it).
Layout and manifest: docs/image-format.md.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from vhpc_slurm import pointers
from vhpc_slurm.catalog.manifest import LIMIT
from vhpc_slurm.catalog.near import UnknownImageError
from vhpc_slurm.catalog.port import Catalog, NoManifestError
from vhpc_slurm.errors import FabricError, UserError
from vhpc_slurm.model import Blob, ImageIdentity, ImageRef

CHUNK = 1 << 20
SIGNATURES_SIZE = 64 << 10
"""Maximum bytes of the signatures of a manifest; what is beyond is not read."""


class FolderCatalog(Catalog):
    """A catalogue that is a folder; links in it are followed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def refs(self) -> Iterator[ImageRef]:
        """All names, sorted; FabricError if the catalogue cannot be read."""
        try:
            for name in sorted(path for path in (self.path / "names").iterdir() if path.is_dir()):
                for tag in sorted(path.name for path in name.iterdir()):
                    try:
                        yield ImageRef.parse(f"{name.name}:{tag}")
                    except UserError:
                        continue  # a file that is being written, or not one of vhpc's
        except FileNotFoundError:
            return
        except OSError as err:
            raise self._unreadable(err) from err

    def pointers_of(self, ref: ImageRef) -> dict[str, str]:
        """Architecture -> digest of the images that a name points to; empty if it points to none."""
        try:
            return self.pointed(ref)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            known = [replace(other, own=ref.own) for other in self.refs()]
            raise UnknownImageError(ref, known, "" if known else f"the catalogue {self}") from None
        except OSError as err:
            raise self._unreadable(err) from err

    def pointed(self, ref: ImageRef) -> dict[str, str]:
        """The content of a name's file; empty if it is not one. Raises OSError."""
        with _open(self.name_file(ref)) as file:
            if not _is_regular(file):
                return {}
            return pointers.parse(file.read(pointers.LIMIT).decode("ascii", "replace"))

    def manifest_of(self, digest: str, image: str) -> bytes:
        """The bytes that the catalogue has for a digest."""
        try:
            with _open(self.manifest_file(digest)) as file:
                if not _is_regular(file):
                    why = f"the manifest {digest} is not a regular file"
                    raise UserError(f"image {image} is broken", why, self.repair)
                return file.read(LIMIT + 1)
        except FileNotFoundError:
            why = f"the catalogue has no manifest {digest}"
            raise NoManifestError(f"image {image} is broken", why, self.repair) from None
        except OSError as err:
            raise self._unreadable(err) from err

    def signatures_of(self, image: ImageIdentity) -> bytes:
        """The signatures of an image's manifest; empty if it has none."""
        try:
            with _open(self.signatures_file(image.digest)) as file:
                return file.read(SIGNATURES_SIZE) if _is_regular(file) else b""
        except FileNotFoundError:
            return b""
        except OSError as err:
            raise self._unreadable(err) from err

    def name_file(self, ref: ImageRef) -> Path:
        """Path of the file that has a name's digest."""
        return self.path / "names" / ref.name / ref.tag

    def manifest_file(self, digest: str) -> Path:
        """Path of the manifest with a digest."""
        return self.path / "manifests" / "sha256" / f"{digest.removeprefix('sha256:')}.json"

    def signatures_file(self, digest: str) -> Path:
        """Path of the file with the signatures of the manifest with a digest."""
        return self.path / "signatures" / "sha256" / digest.removeprefix("sha256:")

    def blob_path(self, blob: Blob) -> Path:
        """Path of a blob."""
        return self.path / "blobs" / "sha256" / blob.sha256

    def verify_blob(self, blob: Blob, image: str, count: Callable[[int], None] = lambda _: None) -> None:
        """Check a blob's size and bytes (reads all of it).

        ``count`` gets the number of bytes of each piece that was read.

        Raises:
            UserError: it is missing or differs; the message has the blob, the expected and the actual values.
            FabricError: it cannot be read.
        """
        digest, size = hashlib.sha256(), 0
        try:
            with _open(self.blob_path(blob)) as file:
                if not _is_regular(file):
                    why = f"{blob.file}: blob sha256:{blob.sha256} is not a regular file"
                    raise UserError(f"image {image} is broken", why, "publish it again")
                while size <= blob.size and (chunk := file.read(CHUNK)):
                    digest.update(chunk)
                    size += len(chunk)
                    count(len(chunk))
        except FileNotFoundError:
            why = f"{blob.file}: the catalogue has no blob sha256:{blob.sha256}"
            raise UserError(f"image {image} is broken", why, "publish it again") from None
        except OSError as err:
            raise self._unreadable(err) from err
        if size > blob.size:
            why = f"{blob.file}: expected {blob.size} bytes, found more"
            raise UserError(f"image {image} is broken", why, "publish it again")
        if size != blob.size or digest.hexdigest() != blob.sha256:
            raise UserError(
                f"image {image} is broken",
                f"{blob.file}: expected sha256:{blob.sha256} of {blob.size} bytes, "
                f"found sha256:{digest.hexdigest()} of {size} bytes",
                "publish it again",
            )

    def _unreadable(self, err: OSError) -> FabricError:
        return FabricError(f"cannot read the image catalogue {self}", str(err))


def _open(path: Path) -> BinaryIO:
    """Open a file to read; a pipe is not waited for."""
    # os.fdopen leaves the descriptor open if it is a folder's
    return open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))


def _is_regular(file: BinaryIO) -> bool:
    return stat.S_ISREG(os.fstat(file.fileno()).st_mode)
