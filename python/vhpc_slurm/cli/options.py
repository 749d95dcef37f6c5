# SPDX-License-Identifier: Apache-2.0
"""Options that several commands of `vhpc` have, and the configuration."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vhpc_slurm.options import Option, ValueRefusedError

if TYPE_CHECKING:
    from vhpc_slurm.catalog import FolderCatalog
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

CatalogFolder = Annotated[
    Path | None,
    typer.Option(
        "--catalog", metavar="DIR", help="Another catalogue; default: images.catalog.", show_default=False
    ),
]
ImageArgument = Annotated[str, typer.Argument(metavar="[own/]NAME[:TAG][@DIGEST]", show_default=False)]
NewImage = Annotated[str, typer.Argument(metavar="[own/]NAME[:TAG]", show_default=False)]
Own = Annotated[bool, typer.Option("--own", help="Your own catalogue (images.user_catalog).")]


def sbatch(
    declared: Sequence[Option], text: Callable[[Option], str], *, variables: bool = False
) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """A decorator: the command has arguments for these options of sbatch, in place of its ``asked``.

    ``asked`` gets the values that are given, by the field of ``JobRequest``.

    Args:
        declared: the options; their arguments are called as they are, without --vhpc-.
        text: the help of one.
        variables: an option that is not given has the value of its variable, as for sbatch.
    """

    def with_arguments(command: Callable[..., int]) -> Callable[..., int]:
        signature = inspect.signature(command, eval_str=True)
        arguments = [_argument(one, text(one), variable=variables) for one in declared]
        parameters = [*signature.parameters.values()]
        at = [*signature.parameters].index("asked")
        parameters[at : at + 1] = arguments

        @functools.wraps(command)
        def called(**given: Any) -> int:
            asked: dict[str, Any] = {}
            for one in arguments:
                asked |= given.pop(one.name, None) or {}
            return command(**given, asked=asked)

        called.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        called.__annotations__ = {one.name: one.annotation for one in parameters}
        return called

    return with_arguments


def _argument(option: Option, text: str, *, variable: bool) -> inspect.Parameter:
    def parse(value: str) -> dict[str, Any]:
        try:
            return option.values(value)
        except ValueRefusedError as err:
            raise typer.BadParameter(f"{value[:80]!r}: {err}") from None

    argument = typer.Option(
        f"--{option.name}",
        metavar=option.shape,
        help=text,
        parser=parse,
        show_default=False,
        envvar=option.variable if variable else None,
        show_envvar=False,
    )
    annotation = Annotated[dict[str, Any] | None, argument]
    name = option.name.replace("-", "_")
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def config() -> Config:
    """The configuration, loaded when a command needs it."""
    from vhpc_slurm.config import load

    return load()


def catalog(config: Config, given: Path | None, *names: str, own: bool = False) -> FolderCatalog:
    """The catalogue that an image command works on.

    Args:
        config: the configuration.
        given: ``--catalog``.
        names: images as the user wrote them; ``own/NAME`` means the user's own catalogue.
        own: ``--own``.

    Raises:
        UserError: names of two catalogues, or the site has no catalogues of users.
    """
    from vhpc_slurm.catalog import FolderCatalog, own_catalog, site_catalog
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
        return own_catalog(config.images, context.user_name())
    return site_catalog(config.images) if given is None else FolderCatalog(given.absolute())
