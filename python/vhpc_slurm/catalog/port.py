# SPDX-License-Identifier: Apache-2.0
"""The port to a catalogue: what its readers ask, wherever names, manifests and signatures are kept.

A name is resolved to a digest once, on the controller, when a lease is made;
nodes then fetch by digest.  The content of a catalogue is not trusted: a
manifest's bytes must match its digest.  An unknown or broken image is the user's
mistake: the job fails with one message, and no node is drained.
"""

from __future__ import annotations

import contextlib
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from vhpc_slurm.catalog.manifest import Manifest, decode_manifest, decode_whole
from vhpc_slurm.errors import UserError, VhpcError
from vhpc_slurm.model import Blob, ImageIdentity, ImageManifest, ImageRef
from vhpc_slurm.record import Record


class NoManifestError(UserError):
    """The catalogue has no manifest of a digest."""


class SeveralArchitecturesError(UserError):
    """A name has images of several architectures, and none is wanted."""


class CatalogEntry(Record, frozen=True):
    """One image of a name of a catalogue.

    ``identity`` is None if the image is broken; ``problem`` then gives the reason in one line.
    """

    ref: ImageRef
    identity: ImageIdentity | None
    problem: str = ""


class Signed(Record, frozen=True):
    """The bytes of a manifest, and its signatures in the text form of OpenSSH, one after the other."""

    manifest: bytes
    signatures: bytes


class Catalog(ABC):
    """Images under names.

    All methods raise FabricError if the site's catalogue cannot be read, and UserError if a user's
    own cannot be read.
    """

    repair = "publish it again"
    """The owner's command or action that repairs a broken image."""

    @abstractmethod
    def refs(self) -> Iterable[ImageRef]:
        """All names, sorted."""

    @abstractmethod
    def pointers_of(self, ref: ImageRef) -> Mapping[str, str]:
        """Architecture -> digest of a name; empty if it is broken. UnknownImageError: no such name."""

    @abstractmethod
    def manifest_of(self, digest: str, image: str) -> bytes:
        """The bytes that the catalogue has for a digest.

        Args:
            digest: ``sha256:`` and 64 hex digits.
            image: name of the image in error messages.

        Raises:
            NoManifestError: there are none.
            UserError: they cannot be a manifest.
        """

    @abstractmethod
    def signatures_of(self, image: ImageIdentity) -> bytes:
        """The signatures of an image's manifest; empty if it has none."""

    @abstractmethod
    def blob_path(self, blob: Blob) -> Path:
        """Path of a blob, for a process with the rights of its user; its bytes are not checked."""

    def resolve(self, ref: ImageRef, arch: str = "", emulated: Collection[str] = ()) -> ImageIdentity:
        """The image that a name refers to now, or the one of its digest.

        Args:
            ref: name or digest.
            arch: wanted architecture; empty: the name must have an image of one architecture only.
            emulated: architectures that do too, if the name has no image of ``arch``.

        Raises:
            SeveralArchitecturesError: it has several.
            UserError: no such image (suggests similar names), it is for another architecture, or its
                manifest is broken.
        """
        digest = ref.digest or self._digest_for(ref, arch, emulated)
        found = self._resolved(ref, digest)
        if arch and found.manifest.arch not in (arch, *emulated):
            raise _elsewhere(ref, found.manifest.arch, arch)
        return found

    def _digest_for(self, ref: ImageRef, arch: str, emulated: Collection[str]) -> str:
        found = self.pointers_of(ref)
        if not found:
            raise UserError(f"image {ref} is broken", "its name file has no digest", self.repair)
        for one in (arch, *emulated) if arch else ():
            if one in found:
                return found[one]
        if len(found) == 1:
            return next(iter(found.values()))
        known = sorted(found)
        if arch:
            raise _elsewhere(ref, " and ".join(known), arch)
        hint = ", ".join(f"{ref.label}@{found[one]} ({one})" for one in known)
        raise SeveralArchitecturesError(
            f"image {ref} is for several architectures", "", f"choose one: {hint}"
        )

    def _resolved(self, ref: ImageRef, digest: str) -> ImageIdentity:
        try:
            raw = self.manifest_of(digest, str(ref))
        except NoManifestError as err:
            raise _unknown_digest(ref) if ref.digest else err from None
        return identity(ref, digest, raw)

    def load_manifest(self, digest: str, image: str = "") -> ImageManifest:
        """The parts of a manifest that a lease carries; arguments and errors as ``read_manifest``."""
        return _decoded(self._checked(digest, image or digest), image or digest)

    def read_manifest(self, digest: str, image: str = "") -> Manifest:
        """All that the manifest with a digest says.

        Args:
            digest: ``sha256:`` and 64 hex digits.
            image: name of the image in error messages; default is the digest.

        Raises:
            UserError: it does not exist, does not match its digest, or is not a manifest that vhpc accepts.
        """
        raw = self._checked(digest, image or digest)
        try:
            return decode_whole(raw)
        except ValueError as err:
            raise _unusable(image or digest, err) from err

    def read_signed(self, image: ImageIdentity) -> Signed:
        """The manifest of an image and its signatures.

        Raises:
            UserError: the manifest does not exist, or does not match the image's digest.
        """
        return Signed(self._checked(image.digest, str(image.ref)), self.signatures_of(image))

    def _checked(self, digest: str, image: str) -> bytes:
        raw = self.manifest_of(digest, image)
        _check_digest(digest, raw, image)
        return raw

    def images(self) -> list[CatalogEntry]:
        """Images of all names, sorted, also broken ones; empty if the catalogue does not exist."""
        return [entry for ref in self.refs() for entry in self._entries(ref)]

    def all_of(self, ref: ImageRef) -> tuple[ImageIdentity, ...]:
        """The images of all architectures of a name, or the one of its digest; errors as ``resolve``."""
        if ref.digest or not (found := self.pointers_of(ref)):
            return (self.resolve(ref),)
        return tuple(self._resolved(ref, found[arch]) for arch in sorted(found))

    def _entries(self, ref: ImageRef) -> list[CatalogEntry]:
        try:
            return [CatalogEntry(ref, image) for image in self.all_of(ref)]
        except UserError as err:
            return [CatalogEntry(ref, None, err.line())]

    def labels(self, image: ImageIdentity) -> list[str]:
        """Names under which an image is known, as NAME:TAG.

        An image that was found by its name has this name. An image that was found by its digest has
        all names that point to the digest now, because the name that was given with the digest is
        not checked.
        """
        if not image.ref.digest:
            return [image.ref.label]
        found = []
        for ref in self.refs():
            with contextlib.suppress(VhpcError):  # a name that was removed, or that is no file
                if image.digest in self.pointers_of(ref).values():
                    found.append(ref.label)
        return found


def identity(ref: ImageRef, digest: str, raw: bytes) -> ImageIdentity:
    """The image of a digest under a name, from its manifest's bytes.

    Raises:
        UserError: the bytes do not match the digest, or are not a manifest that vhpc accepts.
    """
    _check_digest(digest, raw, str(ref))
    return ImageIdentity(ref, digest, replace(_decoded(raw, str(ref)), name=ref.name, tag=ref.tag))


def _decoded(raw: bytes, image: str) -> ImageManifest:
    try:
        return decode_manifest(raw)
    except ValueError as err:
        raise _unusable(image, err) from err


def _unusable(image: str, err: ValueError) -> UserError:
    return UserError(f"image {image} has an unusable manifest", str(err), "publish it again")


def _check_digest(digest: str, raw: bytes, image: str) -> None:
    actual = "sha256:" + hashlib.sha256(raw).hexdigest()
    if actual != digest:
        why = f"manifest: expected {digest}, found {actual}"
        raise UserError(f"image {image} is broken", why, "publish it again")


def _elsewhere(ref: ImageRef, there: str, wanted: str) -> UserError:
    return UserError(
        f"image {ref} is for {there}, not for {wanted}",
        "",
        f"choose an image for {wanted} (vhpc image ls --json), or nodes of the image's architecture",
    )


def _unknown_digest(ref: ImageRef) -> UserError:
    """The error for a digest that the user has written, and that no image has."""
    return UserError(
        f"image {ref} is unknown",
        "the catalogue has no image of this digest: it is mistyped, or the image was removed",
        f"the digest that the name has now: vhpc image show {ref.label}",
    )
