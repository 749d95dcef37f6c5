# SPDX-License-Identifier: Apache-2.0
"""A user's own catalogue (``images.user_catalog``), as vhpcd and other processes read it.

The reader may have more rights than the owner, so no link is followed, and every folder
and file on the way must belong to the owner: nothing that the owner cannot read can be
reached. Nodes read blobs in a process with the owner's rights (``node.store.images``).
"""
# Decision: Users' own catalogues are named, and read with the users' rights

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from vhpc_slurm import pointers
from vhpc_slurm.catalog.folder import SIGNATURES_SIZE, FolderCatalog
from vhpc_slurm.catalog.manifest import LIMIT
from vhpc_slurm.catalog.near import UnknownImageError
from vhpc_slurm.catalog.port import Catalog, NoManifestError
from vhpc_slurm.errors import UserError
from vhpc_slurm.model import Blob, ImageIdentity, ImageRef
from vhpc_slurm.model.image import OWN
from vhpc_slurm.record import Record

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
NAMES_MAX = 1000
"""Names that are read for a hint."""


class Owner(Record, frozen=True):
    """The user who owns a catalogue."""

    name: str
    uid: int


class NotThereError(UserError):
    """A file of the catalogue does not exist."""


class OwnCatalog(Catalog):
    """A user's own catalogue; UserError if this process or the owner cannot read it."""

    repair = "import it again"

    def __init__(self, folder: Path, owner: Owner) -> None:
        self._folder, self._owner, self._files = folder, owner, FolderCatalog(folder)

    def refs(self) -> list[ImageRef]:
        """The names, at most ``NAMES_MAX``; also raises OSError."""
        found: list[ImageRef] = []
        with self._opened() as top, self._below(top, "names") as names:
            for name in sorted(os.listdir(names))[:NAMES_MAX]:  # noqa: PTH208 - a descriptor
                with contextlib.suppress(UserError, OSError), self._below(names, name) as tags:
                    for tag in sorted(os.listdir(tags))[:NAMES_MAX]:  # noqa: PTH208 - a descriptor
                        with contextlib.suppress(UserError):  # not one of vhpc's
                            found.append(ImageRef.parse(f"{OWN}{name}:{tag}"))
        return found[:NAMES_MAX]

    def pointers_of(self, ref: ImageRef) -> dict[str, str]:
        """The content of a name's file."""
        try:
            raw = self._read(self._files.name_file(ref), pointers.LIMIT, ref)
        except NotThereError:
            known = []
            with contextlib.suppress(UserError, OSError):
                known = self.refs()
            raise UnknownImageError(ref, known) from None
        return pointers.parse(raw.decode("ascii", "replace"))

    def manifest_of(self, digest: str, image: str) -> bytes:
        """The bytes that the catalogue has for a digest."""
        try:
            return self._read(self._files.manifest_file(digest), LIMIT + 1, image)
        except NotThereError:
            why = f"your catalogue has no manifest {digest}"
            raise NoManifestError(f"image {image} is broken", why, self.repair) from None

    def signatures_of(self, image: ImageIdentity) -> bytes:
        """The signatures of an image's manifest; empty if it has none."""
        try:
            return self._read(self._files.signatures_file(image.digest), SIGNATURES_SIZE, image.ref)
        except NotThereError:
            return b""

    def blob_path(self, blob: Blob) -> Path:
        """Path of a blob, for a process with the owner's rights."""
        return self._files.blob_path(blob)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        try:
            top = os.open(self._folder, FOLDER)
        except FileNotFoundError:
            raise UserError(
                f"{self._owner.name} has no image catalogue of their own",
                f"{self._folder} does not exist",
                "make one there: vhpc image import SOURCE own/NAME; see also: vhpc image ls",
            ) from None
        except OSError as err:
            raise _unreadable(self._folder, err) from err
        try:
            self._check_owner(top, self._folder)
            yield top
        finally:
            os.close(top)

    @contextlib.contextmanager
    def _below(self, above: int, part: str, path: Path | None = None) -> Iterator[int]:
        """A folder of the owner; errors name ``path``. OSError if it is a link."""
        fd = os.open(part, FOLDER, dir_fd=above)
        try:
            self._check_owner(fd, path or self._folder / part)
            yield fd
        finally:
            os.close(fd)

    def _check_owner(self, fd: int, path: Path) -> None:
        name = self._owner.name
        if os.fstat(fd).st_uid != self._owner.uid:
            raise UserError(f"the image catalogue of {name} is not used", f"{path} does not belong to {name}")

    def _read(self, path: Path, limit: int, image: ImageRef | str) -> bytes:
        """At most ``limit`` bytes of a regular file of the catalogue; no component may be a link."""
        *above, last = path.relative_to(self._folder).parts
        with contextlib.ExitStack() as opened:
            fd = opened.enter_context(self._opened())
            try:
                for part in above:
                    fd = opened.enter_context(self._below(fd, part, path))
                # a pipe must not be waited for
                flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_NOFOLLOW | os.O_CLOEXEC
                fd = os.open(last, flags, dir_fd=fd)
                opened.callback(os.close, fd)
                self._check_owner(fd, path)
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    raise UserError(f"image {image} is broken", f"{path} is not a regular file")
                with os.fdopen(fd, "rb", closefd=False) as file:
                    return file.read(limit)
            except FileNotFoundError:
                raise NotThereError(
                    f"image {image} is unknown", f"{path} does not exist", "see: vhpc image ls --own"
                ) from None
            except OSError as err:
                raise _unreadable(path, err) from err


def _unreadable(path: Path, err: OSError) -> UserError:
    if err.errno in {errno.ELOOP, errno.ENOTDIR}:
        return UserError(
            f"cannot read {path}", "a part of it is a link or not a folder", "links are not followed"
        )
    hint = ""
    if err.errno in {errno.EACCES, errno.EPERM}:
        hint = "vhpcd reads names and manifests: make these folders readable for all (chmod a+rX)"
    return UserError(f"cannot read {path}", err.strerror or str(err), hint)
