# SPDX-License-Identifier: Apache-2.0
"""Images: what a manifest may say, and the folders in which images are published.

Decides what a name means now and whether a manifest is acceptable. Starts nothing,
knows neither nodes nor jobs. ``manifest`` has the format and touches no file;
``folder`` reads catalogues, ``own`` those of users, ``edit`` changes them. Used by vhpcd
(names to digests), by nodes (through the lease) and by the ``vhpc`` command.
"""

from __future__ import annotations

from vhpc_slurm.catalog.folder import (
    CatalogEntry,
    Signed,
    blob_path,
    blobs,
    chunk_list,
    identity,
    labels,
    list_images,
    load_manifest,
    manifest_file,
    name_file,
    pointed_digest,
    read_manifest,
    read_signed,
    refs,
    resolve,
    signatures_file,
    verify_blob,
    with_list,
)
from vhpc_slurm.catalog.manifest import Manifest, decode_manifest
from vhpc_slurm.catalog.near import UnknownImageError
from vhpc_slurm.catalog.own import Owner, other_names, own_folder, read_signed_for, resolve_for

__all__ = [
    "CatalogEntry",
    "Manifest",
    "Owner",
    "Signed",
    "UnknownImageError",
    "blob_path",
    "blobs",
    "chunk_list",
    "decode_manifest",
    "identity",
    "labels",
    "list_images",
    "load_manifest",
    "manifest_file",
    "name_file",
    "other_names",
    "own_folder",
    "pointed_digest",
    "read_manifest",
    "read_signed",
    "read_signed_for",
    "refs",
    "resolve",
    "resolve_for",
    "signatures_file",
    "verify_blob",
    "with_list",
]
