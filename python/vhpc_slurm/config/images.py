# SPDX-License-Identifier: Apache-2.0
"""The table [images] of vhpc.toml: every key of it, its meaning and its default."""

from __future__ import annotations

from typing import Annotated

import msgspec

from vhpc_slurm.config.setting import documented

REQUIREMENT = r"^(?:([A-Za-z0-9_.-]+):)?([A-Za-z0-9_-]+)(?:(>=|==)([0-9]+(?:\.[0-9]+)*))?$"
"""``[TYPE:]MODULE[>=VERSION|==VERSION]``: the form of items of ``gpu_drivers``."""


class Images(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Image catalogue and node store."""

    catalog: Annotated[
        str, documented("catalogue folder: names, manifests, blobs; readable by vhpcd and by nodes")
    ] = "/var/lib/vhpc/catalog"
    user_catalog: Annotated[
        str,
        documented(
            "catalogue folder of each user, with {user} in place of the user's name, like "
            '"/home/{user}/.vhpc/catalog"; it must belong to the user, and vhpcd must be able to read its '
            "names and manifests. Empty: jobs get images of the site only",
            pattern=r"^(/.*\{user\}.*)?$",
        ),
    ] = ""
    allowed_signers: Annotated[
        str,
        documented(
            "file of ssh-keygen(1), ALLOWED SIGNERS, with the keys whose signatures of images count; the "
            "same on vhpcd's host and on nodes. Empty: signatures are not checked"
        ),
    ] = ""
    revoked_signers: Annotated[
        str, documented("file with revoked keys: public keys or a KRL, as for ssh-keygen -r; empty: none")
    ] = ""
    gpu_drivers: Annotated[
        tuple[Annotated[str, msgspec.Meta(pattern=REQUIREMENT)], ...],
        documented(
            "drivers that images need for jobs with GPUs: MODULE, MODULE>=VERSION or MODULE==VERSION; before "
            'it TYPE: for GPUs of a type of Slurm\'s generic resource, like "nvidia>=535" or "mi300:amdgpu". '
            "One of those for a GPU suffices; a GPU without any is given to every image"
        ),
    ] = ()
    store: Annotated[str, documented("verified copies on a node, by digest")] = "/var/lib/vhpc/images"
    store_max_mib: Annotated[
        int,
        documented(
            "largest size of the store, in MiB: images that no job uses are removed for others, the least "
            "recently used first; 0: as large as its file system",
            ge=0,
            le=1 << 32,
        ),
    ] = 0
    store_keep_free_mib: Annotated[
        int,
        documented("space in that file system that copies of images leave free, in MiB", ge=0, le=1 << 32),
    ] = 64
    peer_port: Annotated[
        int,
        documented(
            "TCP port at which nodes of a job, or of vhpc image warm, ask each other for the image before "
            "they read the catalogue; below 1024, so that no user can take it. 0: each node reads the "
            "catalogue",
            ge=0,
            le=65535,
        ),
    ] = 0
    peer_names: Annotated[
        str,
        documented(
            "host name or address of a node on the network for this, with {node} in place of its name in "
            'Slurm, like "{node}-ib"',
            pattern=r"^[^{}]*\{node\}[^{}]*$",
        ),
    ] = "{node}"
    import_kernel: Annotated[
        str,
        documented(
            "image of the site whose kernel boots what `vhpc image import` imports, like debian-minimal. "
            "Empty: users name one with --kernel"
        ),
    ] = ""
    import_max_mib: Annotated[
        int,
        documented(
            "largest size of an import, in MiB, when it is unpacked; and of an image that is pulled",
            ge=1,
            le=1 << 24,
        ),
    ] = 65536
    import_max_files: Annotated[int, documented("largest number of files in an import", ge=1, le=1 << 26)] = (
        2_000_000
    )
    import_timeout_s: Annotated[
        int, documented("deadline of an import, a pull or a push", ge=1, le=86400)
    ] = 3600
