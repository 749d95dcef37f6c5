# SPDX-License-Identifier: Apache-2.0
"""An image's manifest and signatures as this node reads them.

Those of the site's catalogue are read as its blobs are. Root opens no file of a user: those of a
user's own catalogue come from a child process with the user's rights, which has a deadline.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Generator
from pathlib import Path

from vhpc_slurm.catalog import Signed, identity, own_catalog, site_catalog
from vhpc_slurm.catalog.folder import SIGNATURES_SIZE
from vhpc_slurm.catalog.manifest import LIMIT
from vhpc_slurm.errors import UserError
from vhpc_slurm.model import ImageIdentity
from vhpc_slurm.node.host.accounts import Account
from vhpc_slurm.node.store import blobsource
from vhpc_slurm.node.store.layout import Layout

CHECK_S = 2.0
"""Longest wait for a user's file system before the caller is asked, in seconds."""
ABSENT = os.strerror(errno.ENOENT)


def read(layout: Layout, image: ImageIdentity, account: Account) -> Generator[None, None, Signed]:
    """Read the manifest with an image's digest, and its signatures; a generator.

    Yields every ``CHECK_S`` seconds of a wait for a user's file system.

    Args:
        layout: has the paths of the catalogues.
        image: the image; only its name and its digest count.
        account: of the job's user, with whose rights a catalogue of the user's own is read.

    Raises:
        UserError: the manifest does not exist, cannot be read, or does not match the digest.
        FabricError: the site's catalogue cannot be read.
    """
    config = layout.config
    if not image.ref.own:
        return site_catalog(config.images).read_signed(image)
    catalog = own_catalog(config.images, account.name)
    until = time.monotonic() + config.guests.stage_timeout_s
    path = catalog.manifest_file(image.digest)
    manifest, why = yield from _of_user(path, LIMIT + 1, account, until)
    if why:
        raise UserError(f"image {image.ref} is broken", f"cannot read {path}: {why}", "publish it again")
    identity(image.ref, image.digest, manifest)  # the bytes match the digest, or UserError
    path = catalog.signatures_file(image.digest)
    found, why = yield from _of_user(path, SIGNATURES_SIZE, account, until)
    if why and why != ABSENT:
        raise UserError(f"the signatures of image {image.ref} cannot be read", f"{path}: {why}")
    return Signed(manifest, b"" if why else found)


def _of_user(
    path: Path, limit: int, account: Account, until: float
) -> Generator[None, None, tuple[bytes, str]]:
    """At most ``limit`` bytes of a user's file, and why there are no more, if that is an error."""
    data = bytearray()
    with blobsource.of_user(path, account) as source:
        while len(data) < limit:
            if source.wait(CHECK_S):
                chunk = source.read(limit - len(data))
                if not chunk:
                    return bytes(data), source.why_ended()
                data += chunk
            elif time.monotonic() > until:
                raise UserError(
                    f"cannot read {path}", "no answer", "is the file system of your catalogue slow?"
                )
            else:
                yield
    return bytes(data), ""
