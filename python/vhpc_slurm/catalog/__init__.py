# SPDX-License-Identifier: Apache-2.0
"""Images: the format of manifests, and the catalogues in which images are published.

Decides which digest a name has now and whether a manifest is acceptable. It starts nothing and
does not know nodes or jobs. ``manifest`` has the format and touches no file; ``port`` is the
interface for readers, ``folder`` and ``own`` implement it, ``choice`` decides which one has an
image; ``edit`` and ``publish`` change folders. Used by vhpcd (names to digests), by nodes
(through the lease) and by the ``vhpc`` command.
"""

from __future__ import annotations

from vhpc_slurm.catalog.choice import catalog_for, other_names, own_catalog, resolve_for, site_catalog
from vhpc_slurm.catalog.folder import FolderCatalog
from vhpc_slurm.catalog.manifest import Manifest, blobs, chunk_list, decode_manifest, with_list
from vhpc_slurm.catalog.near import UnknownImageError
from vhpc_slurm.catalog.own import Owner
from vhpc_slurm.catalog.port import Catalog, CatalogEntry, SeveralArchitecturesError, Signed, identity

__all__ = [
    "Catalog",
    "CatalogEntry",
    "FolderCatalog",
    "Manifest",
    "Owner",
    "SeveralArchitecturesError",
    "Signed",
    "UnknownImageError",
    "blobs",
    "catalog_for",
    "chunk_list",
    "decode_manifest",
    "identity",
    "other_names",
    "own_catalog",
    "resolve_for",
    "site_catalog",
    "with_list",
]
