# SPDX-License-Identifier: Apache-2.0
"""Options that several commands of `vhpc` have, and the configuration."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

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
SUFFIXES = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024 * 1024}


@dataclass(frozen=True)
class Disk:
    """A disk of each guest; without ``mount`` it takes the changes to the root."""

    mib: int
    mount: str = ""


def _disk(text: str) -> Disk:
    """Parse SIZE[:/MOUNT/POINT], the value of --vhpc-disk; parts of a MiB count as one.

    Raises:
        typer.BadParameter: it has another form, or no disk can be mounted there.
    """
    from vhpc_slurm.config.disks import MAX_DISK_MIB, MIN_DISK_MIB, mount_point_refusal

    size, colon, mount = text.partition(":")
    match = re.fullmatch(r"([0-9]{1,12})([KMGT]?)", size.upper(), re.ASCII)
    mib = math.ceil(int(match[1]) * SUFFIXES[match[2] or "M"]) if match else 0
    if not MIN_DISK_MIB <= mib <= MAX_DISK_MIB:
        raise typer.BadParameter(
            f"a size from {MIN_DISK_MIB}M to 16T is expected: a whole number with the suffix K, M, G or T"
        )
    if colon and (why := mount_point_refusal(mount)):
        raise typer.BadParameter(f"{mount[:80]!r}: {why}")
    return Disk(mib, mount)


def disk_option(text: str) -> Any:
    """The option --disk of a command, with this help."""
    return typer.Option("--disk", metavar="SIZE[:/MOUNT/POINT]", help=text, parser=_disk, show_default=False)


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
