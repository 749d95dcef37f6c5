# SPDX-License-Identifier: Apache-2.0
"""Whether the store of images on a compute node has room for the images of the site."""

from __future__ import annotations

from vhpc_slurm.catalog import blobs, site_catalog
from vhpc_slurm.cli.host.checks import CheckResult, ok, warn
from vhpc_slurm.config import Config
from vhpc_slurm.errors import VhpcError
from vhpc_slurm.model import ImageIdentity
from vhpc_slurm.node.store import images, pins, room
from vhpc_slurm.node.store.layout import Layout

CHECK = "images.store"
MIB = 1 << 20


def check(config: Config) -> CheckResult:
    """The store's size and free space, compared with the largest image of the catalogue."""
    layout, store = Layout(config), config.images.store
    try:
        capacity, free = room.capacity_of(layout), room.free_of(layout)
        removable = sum(map(room.size_of, pins.unused(layout)))
    except FileNotFoundError:
        return ok(CHECK, f"{store} does not exist yet: the first job makes it")
    except OSError as err:
        return warn(CHECK, f"{store} cannot be read: {err.strerror}", "run vhpc doctor as root")
    image, size = _largest(config)
    room_mib = (free + removable) // MIB
    text = f"{store} may have {capacity // MIB} MiB of images, and has room for {room_mib} MiB more"
    if config.images.store_max_mib * MIB > capacity:
        text += f", less than images.store_max_mib = {config.images.store_max_mib}"
        return warn(CHECK, text, "use a larger file system, or lower images.store_max_mib")
    if image is not None and size > capacity:
        text += f", but image {image.ref} has {size // MIB} MiB: its jobs fail here"
        return warn(CHECK, text, "use a larger file system, or raise images.store_max_mib")
    if image is not None and size > free + removable and not images.is_stored(layout, image):
        text += f"; jobs with image {image.ref}, {size // MIB} MiB, are requeued here until there is space"
        hint = "wait until jobs with other images end, or remove what else is in its file system"
        return warn(CHECK, text, hint)
    return ok(CHECK, text)


def _largest(config: Config) -> tuple[ImageIdentity | None, int]:
    """The largest image of the site, and its size in bytes."""
    try:
        found = [entry.identity for entry in site_catalog(config.images).images() if entry.identity]
    except (VhpcError, OSError):  # the check of the catalogue reports it
        found = []
    sizes = [(sum(blob.size for blob in blobs(image.manifest)), at) for at, image in enumerate(found)]
    size, at = max(sizes, default=(0, 0))
    return (found[at], size) if found else (None, 0)
