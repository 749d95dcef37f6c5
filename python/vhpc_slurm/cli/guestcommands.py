# SPDX-License-Identifier: Apache-2.0
"""Commands of `vhpc` by which users work in guests: their arguments and help."""

from __future__ import annotations

from typing import Annotated

import typer

from vhpc_slurm.cli import options
from vhpc_slurm.cli.groups import Catalog
from vhpc_slurm.cli.options import JobId, Json


def shell(
    ctx: typer.Context,
    image: Annotated[
        str,
        typer.Argument(
            metavar="IMAGE|SOURCE",
            help="An image, or docker://NAME or KIND:PATH as for vhpc image import.",
            show_default=False,
        ),
    ],
) -> None:
    """Start an interactive shell in a guest of an image; other options are those of srun.

    A container that is not an image yet is imported into your own catalogue first.
    """
    from vhpc_slurm.cli import shell as interactive

    interactive.run(options.config(), image, ctx.args)


def save(
    job_id: JobId,
    target: Annotated[str, typer.Argument(metavar="[own/]NAME[:TAG]", show_default=False)],
    catalog: Catalog = None,
    as_json: Json = False,
) -> int:
    """Make an image of the files of a running job's first guest, without those of shared folders."""
    from vhpc_slurm.cli import save as saving

    config = options.config()
    return saving.run(config, options.catalog(config, catalog, target), job_id, target, as_json=as_json)
