# SPDX-License-Identifier: Apache-2.0
"""Which catalogue an image is in: the site's, or its user's own."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection
from pathlib import Path

from vhpc_slurm.catalog.folder import FolderCatalog
from vhpc_slurm.catalog.near import UnknownImageError
from vhpc_slurm.catalog.own import OwnCatalog, Owner
from vhpc_slurm.catalog.port import Catalog
from vhpc_slurm.config.images import Images
from vhpc_slurm.errors import UserError, VhpcError
from vhpc_slurm.model import ImageIdentity, ImageRef

USER_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@-]{0,255}\Z", re.ASCII)


def site_catalog(images: Images) -> FolderCatalog:
    """The catalogue of the site."""
    return FolderCatalog(Path(images.catalog))


def own_catalog(images: Images, user: str) -> FolderCatalog:
    """A user's own catalogue, for a process with that user's rights.

    Raises:
        UserError: users have no catalogues on this site, or this user cannot have one.
    """
    if not images.user_catalog:
        raise UserError(
            "images of users' own are not used on this site",
            "images.user_catalog is not set",
            "use an image of the site (vhpc image ls), or ask your administrator",
        )
    if not USER_NAME.match(user):
        raise UserError(f"user {user!r} cannot have an image catalogue", "the name is not a file name")
    return FolderCatalog(Path(images.user_catalog.replace("{user}", user)))


def catalog_for(images: Images, owner: Owner | None) -> Catalog:
    """A user's own catalogue, for a process that may have more rights; None: the site's.

    Raises:
        UserError: as ``own_catalog``.
    """
    return OwnCatalog(own_catalog(images, owner.name).path, owner) if owner else site_catalog(images)


def resolve_for(
    images: Images, ref: ImageRef, owner: Owner, arch: str = "", emulated: Collection[str] = ()
) -> ImageIdentity:
    """The image that a user's ``--vhpc-image`` means now: of the site, or of the user's own catalogue.

    ``arch`` is that of the nodes, ``emulated`` as for ``Catalog.resolve``.

    Raises:
        SeveralArchitecturesError: as ``Catalog.resolve``.
        UserError: no such image, or it is broken, or the site has no catalogues of users.
        FabricError: the catalogue of the site cannot be read.
    """
    try:
        return catalog_for(images, owner if ref.own else None).resolve(ref, arch, emulated)
    except UnknownImageError as err:
        raise err.among(other_names(images, owner, own=not ref.own)) from None


def other_names(images: Images, owner: Owner, *, own: bool) -> list[ImageRef]:
    """Names of the site's catalogue or of the user's own, for a hint: empty if it cannot be read."""
    with contextlib.suppress(VhpcError, OSError):
        return list(catalog_for(images, owner if own else None).refs())
    return []
