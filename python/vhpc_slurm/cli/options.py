# SPDX-License-Identifier: Apache-2.0
"""Options that several commands of `vhpc` have, and the configuration."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from vhpc_slurm.config import Config

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
JobId = Annotated[int, typer.Argument(metavar="JOBID", min=1, help="Slurm's job id.", show_default=False)]
ThisNode = Annotated[
    str | None,
    typer.Option("--node", metavar="NODE", help="Slurm's name of this node, if it is not the host name."),
]
Labels = Annotated[
    list[str] | None,
    typer.Option("--label", metavar="KEY=VALUE", help="A label of the image; again for more."),
]


def config() -> Config:
    """The configuration, loaded when a command needs it."""
    from vhpc_slurm.config import load

    return load()


def catalog(config: Config, given: Path | None, *names: str, own: bool = False) -> Path:
    """The catalogue that an image command works on.

    Args:
        config: the configuration.
        given: ``--catalog``.
        names: images as the user wrote them; ``own/NAME`` means the user's own catalogue.
        own: ``--own``.

    Raises:
        UserError: names of two catalogues, or the site has no catalogues of users.
    """
    from vhpc_slurm.catalog import own_folder
    from vhpc_slurm.cli import context
    from vhpc_slurm.errors import UserError
    from vhpc_slurm.model import ImageRef

    kinds = {ImageRef.parse(name).own for name in names} | ({True} if own else set())
    if len(kinds) == 2 or (given is not None and True in kinds):
        raise UserError(
            "one command works on one catalogue",
            "own/NAME is in your own catalogue, NAME in that of the site or of --catalog",
        )
    if True in kinds:
        return own_folder(config.images.user_catalog, context.user_name())
    return Path(config.images.catalog) if given is None else given.absolute()
