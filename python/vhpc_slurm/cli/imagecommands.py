# SPDX-License-Identifier: Apache-2.0
"""Commands of `vhpc image` that share, compare and build images: their arguments and help."""

from __future__ import annotations

from typing import Annotated

import typer

from vhpc_slurm.cli import options
from vhpc_slurm.cli.groups import Catalog, ImageArgument
from vhpc_slurm.cli.options import Json


def push(
    name: ImageArgument,
    reference: Annotated[str, typer.Argument(metavar="docker://REGISTRY/NAME[:TAG]", show_default=False)],
    catalog: Catalog = None,
    as_json: Json = False,
) -> int:
    """Put an image, with its signatures, into an OCI registry."""
    from vhpc_slurm.cli import imageregistry

    config = options.config()
    where = options.catalog(config, catalog, name)
    return imageregistry.push(config.images, where, name, reference, as_json=as_json)


def pull(
    reference: Annotated[
        str, typer.Argument(metavar="docker://REGISTRY/NAME[:TAG][@DIGEST]", show_default=False)
    ],
    target: Annotated[str, typer.Argument(metavar="[own/]NAME[:TAG]", show_default=False)],
    catalog: Catalog = None,
    as_json: Json = False,
) -> int:
    """Get an image that vhpc image push has put into a registry (owner of the catalogue)."""
    from vhpc_slurm.cli import imageregistry

    config = options.config()
    where = options.catalog(config, catalog, target)
    return imageregistry.pull(config.images, where, reference, target, as_json=as_json)


def diff(
    before: ImageArgument,
    after: ImageArgument,
    catalog: Catalog = None,
    as_json: Json = False,
) -> int:
    """Show what differs between two images: their manifests, and the files of their roots.

    The exit status is 1 if something differs.
    """
    from vhpc_slurm.cli import imagediff

    config = options.config()
    first, second = ((options.catalog(config, catalog, name), name) for name in (before, after))
    return imagediff.diff(config.images, first, second, as_json=as_json)


COMMANDS = {"push": push, "pull": pull, "diff": diff}
