# SPDX-License-Identifier: Apache-2.0
"""vhpc shell: an interactive shell in a guest, in one command."""

from __future__ import annotations

from typing import Annotated, NoReturn

import typer

from vhpc_slurm import slurm
from vhpc_slurm.cli import options
from vhpc_slurm.cli.images import imports
from vhpc_slurm.importing.source import is_source
from vhpc_slurm.model import ImageRef

SHELL = "command -v bash >/dev/null 2>&1 && exec bash -i; exec sh -i"


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
) -> NoReturn:
    """Start an interactive shell in a guest of an image; other options are those of srun.

    A container that is not an image yet is imported into your own catalogue first.
    """
    config = options.config()
    name = imports.resolve_source(config, image) if is_source(image) else str(ImageRef.parse(image))
    arguments = ["--pty", f"--vhpc-image={name}", *ctx.args, "/bin/sh", "-c", SHELL]
    slurm.user_jobs(config).become_srun(arguments)
