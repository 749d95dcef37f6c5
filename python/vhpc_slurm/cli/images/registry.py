# SPDX-License-Identifier: Apache-2.0
"""vhpc image push and pull."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from vhpc_slurm.cli import options, output
from vhpc_slurm.cli.options import CatalogFolder, ImageArgument, Json, NewImage
from vhpc_slurm.cli.progress import progress
from vhpc_slurm.importing import pull as pulling
from vhpc_slurm.importing import push as pushing
from vhpc_slurm.model import ImageRef


def push(
    name: ImageArgument,
    reference: Annotated[str, typer.Argument(metavar="docker://REGISTRY/NAME[:TAG]", show_default=False)],
    catalog: CatalogFolder = None,
    as_json: Json = False,
) -> int:
    """Put an image, with its signatures, into an OCI registry."""
    config = options.config()
    where = options.catalog(config, catalog, name)
    done = pushing.push(config.images, where.resolve(ImageRef.parse(name)), where, reference, progress)
    if as_json:
        output.write_json(msgspec.to_builtins(done))
    else:
        print(f"{done.reference} {done.registry_digest}")
    return 0


def pull(
    reference: Annotated[
        str, typer.Argument(metavar="docker://REGISTRY/NAME[:TAG][@DIGEST]", show_default=False)
    ],
    target: NewImage,
    catalog: CatalogFolder = None,
    as_json: Json = False,
) -> int:
    """Get an image that vhpc image push has put into a registry (owner of the catalogue)."""
    config = options.config()
    where = options.catalog(config, catalog, target)
    done = pulling.pull(config.images, reference, ImageRef.parse(target), where.path, progress)
    if as_json:
        output.write_json(msgspec.to_builtins(done))
    else:
        print(f"{done.image} {done.digest}")
        if not done.changed:
            progress("the name pointed to the same image before")
    return 0
