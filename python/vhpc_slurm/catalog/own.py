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
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from vhpc_slurm.catalog.folder import (
    NAME_SIZE,
    SIGNATURES_SIZE,
    Signed,
    identity,
    manifest_file,
    read_signed,
    refs,
    resolve,
    signatures_file,
    unknown_digest,
)
from vhpc_slurm.catalog.manifest import LIMIT
from vhpc_slurm.catalog.near import UnknownImageError
from vhpc_slurm.config.images import Images
from vhpc_slurm.errors import UserError, VhpcError
from vhpc_slurm.model import DIGEST, ImageIdentity, ImageRef
from vhpc_slurm.model.image import OWN
from vhpc_slurm.record import Record

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
NAMES_MAX = 1000
"""Names that are read for a hint."""
USER_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@-]{0,255}\Z", re.ASCII)


class Owner(Record, frozen=True):
    """The user to whom a catalogue belongs."""

    name: str
    uid: int


class NotThereError(UserError):
    """A file of the catalogue does not exist."""


def resolve_for(images: Images, ref: ImageRef, owner: Owner) -> ImageIdentity:
    """The image that a user's ``--vhpc-image`` means now: of the site, or of the user's own catalogue.

    Raises:
        UserError: no such image, or it is broken, or the site has no catalogues of users.
        FabricError: the catalogue of the site cannot be read.
    """
    try:
        if ref.own:
            return resolve_own(own_folder(images.user_catalog, owner.name), ref, owner)
        return resolve(Path(images.catalog), ref)
    except UnknownImageError as err:
        raise err.among(other_names(images, owner, own=not ref.own)) from None


def other_names(images: Images, owner: Owner, *, own: bool) -> list[ImageRef]:
    """Names of the site's catalogue or of the user's own, for a hint: empty if it cannot be read."""
    with contextlib.suppress(VhpcError, OSError):
        if not own:
            return list(refs(Path(images.catalog)))
        if images.user_catalog:
            return own_refs(own_folder(images.user_catalog, owner.name), owner)
    return []


def own_refs(folder: Path, owner: Owner) -> list[ImageRef]:
    """Names of a user's own catalogue, at most ``NAMES_MAX``; errors as ``resolve_own``, and OSError."""
    found: list[ImageRef] = []
    with _opened(folder, owner) as top, _below(top, folder, "names", owner) as names:
        for name in sorted(os.listdir(names))[:NAMES_MAX]:  # noqa: PTH208 - a descriptor
            with contextlib.suppress(UserError, OSError), _below(names, folder, name, owner) as tags:
                for tag in sorted(os.listdir(tags))[:NAMES_MAX]:  # noqa: PTH208 - a descriptor
                    with contextlib.suppress(UserError):  # not one of vhpc's
                        found.append(ImageRef.parse(f"{OWN}{name}:{tag}"))
    return found[:NAMES_MAX]


@contextlib.contextmanager
def _below(above: int, folder: Path, part: str, owner: Owner) -> Iterator[int]:
    """A folder of the owner in another one; OSError if it is a link."""
    fd = os.open(part, FOLDER, dir_fd=above)
    try:
        _check_owner(fd, folder / part, owner)
        yield fd
    finally:
        os.close(fd)


def own_folder(pattern: str, user: str) -> Path:
    """The catalogue of a user.

    Args:
        pattern: ``images.user_catalog``.
        user: the user's name.

    Raises:
        UserError: users have no catalogues on this site, or this user cannot have one.
    """
    if not pattern:
        raise UserError(
            "images of users' own are not used on this site",
            "images.user_catalog is not set",
            "use an image of the site (vhpc image ls), or ask your administrator",
        )
    if not USER_NAME.match(user):
        raise UserError(f"user {user!r} cannot have an image catalogue", "the name is not a file name")
    return Path(pattern.replace("{user}", user))


def resolve_own(folder: Path, ref: ImageRef, owner: Owner) -> ImageIdentity:
    """The image of a user's own catalogue that a name refers to now, or the one of its digest.

    Raises:
        UserError: no such image, its manifest is broken, or the folder cannot be read by this process.
    """
    with _opened(folder, owner) as top:
        digest = ref.digest or _own_digest(top, folder, owner, ref)
        if not DIGEST.match(digest):
            raise UserError(f"image {ref} is broken", "its name file has no digest", "import it again")
        try:
            raw = _read(top, folder, str(manifest_file(Path(), digest)), LIMIT + 1, owner, ref)
        except NotThereError:
            if ref.digest:
                raise unknown_digest(ref) from None
            why = f"your catalogue has no manifest {digest}"
            raise UserError(f"image {ref} is broken", why, "import it again") from None
    return identity(ref, digest, raw)


def _own_digest(top: int, folder: Path, owner: Owner, ref: ImageRef) -> str:
    """The text in a name's file."""
    try:
        raw = _read(top, folder, f"names/{ref.name}/{ref.tag}", NAME_SIZE, owner, ref)
    except NotThereError:
        known = []
        with contextlib.suppress(UserError, OSError):
            known = own_refs(folder, owner)
        raise UnknownImageError(ref, known) from None
    return raw.decode("ascii", "replace").strip()


def read_signed_for(images: Images, image: ImageIdentity, owner: Owner) -> Signed:
    """Manifest and signatures of an image that ``resolve_for`` has returned; errors as there."""
    if not image.ref.own:
        return read_signed(Path(images.catalog), image)
    folder = own_folder(images.user_catalog, owner.name)
    signatures = str(signatures_file(Path(), image.digest))
    with _opened(folder, owner) as top:
        raw = _read(top, folder, str(manifest_file(Path(), image.digest)), LIMIT + 1, owner, image.ref)
        identity(image.ref, image.digest, raw)  # the bytes match the digest, or UserError
        try:
            found = _read(top, folder, signatures, SIGNATURES_SIZE, owner, image.ref)
        except NotThereError:
            found = b""
    return Signed(raw, found)


@contextlib.contextmanager
def _opened(folder: Path, owner: Owner) -> Iterator[int]:
    try:
        top = os.open(folder, FOLDER)
    except FileNotFoundError:
        raise UserError(
            f"{owner.name} has no image catalogue of their own",
            f"{folder} does not exist",
            "make one there: vhpc image import SOURCE own/NAME; see also: vhpc image ls",
        ) from None
    except OSError as err:
        raise _unreadable(folder, err) from err
    try:
        _check_owner(top, folder, owner)
        yield top
    finally:
        os.close(top)


def _read(top: int, folder: Path, path: str, limit: int, owner: Owner, ref: ImageRef) -> bytes:
    """At most ``limit`` bytes of a regular file below ``top``; no component may be a link."""
    *above, last = path.split("/")
    fds = [top]
    try:
        for part in above:
            fds.append(os.open(part, FOLDER, dir_fd=fds[-1]))
            _check_owner(fds[-1], folder / path, owner)
        # a pipe must not be waited for
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_NOFOLLOW | os.O_CLOEXEC
        fds.append(os.open(last, flags, dir_fd=fds[-1]))
        _check_owner(fds[-1], folder / path, owner)
        if not stat.S_ISREG(os.fstat(fds[-1]).st_mode):
            raise UserError(f"image {ref} is broken", f"{folder / path} is not a regular file")
        with os.fdopen(fds.pop(), "rb") as file:
            return file.read(limit)
    except FileNotFoundError:
        raise NotThereError(
            f"image {ref} is unknown", f"{folder / path} does not exist", "see: vhpc image ls --own"
        ) from None
    except OSError as err:
        raise _unreadable(folder / path, err) from err
    finally:
        for fd in fds[1:]:
            os.close(fd)


def _check_owner(fd: int, path: Path, owner: Owner) -> None:
    if os.fstat(fd).st_uid != owner.uid:
        raise UserError(
            f"the image catalogue of {owner.name} is not used", f"{path} does not belong to {owner.name}"
        )


def _unreadable(path: Path, err: OSError) -> UserError:
    if err.errno in {errno.ELOOP, errno.ENOTDIR}:
        return UserError(
            f"cannot read {path}", "a part of it is a link or not a folder", "links are not followed"
        )
    hint = ""
    if err.errno in {errno.EACCES, errno.EPERM}:
        hint = "vhpcd reads names and manifests: make these folders readable for all (chmod a+rX)"
    return UserError(f"cannot read {path}", err.strerror or str(err), hint)
