# SPDX-License-Identifier: Apache-2.0
"""The commands `vhpc database`: vhpcd's database, while vhpcd does not run."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from vhpc_slurm.cli import options

database_app = typer.Typer(help="vhpcd's database, while vhpcd does not run.", rich_markup_mode=None)


class Engine(StrEnum):
    """An engine; typer 0.15 of Debian 13 does not know ``typing.Literal``."""

    SQLITE = "sqlite"
    MARIADB = "mariadb"


@database_app.callback(invoke_without_command=True)
def _help(ctx: typer.Context) -> None:
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())
        raise typer.Exit


@database_app.command("copy")
def copy(
    to: Annotated[
        Engine,
        typer.Option("--to", help="Engine of the target.", show_default=False),
    ],
) -> int:
    """Copy all leases into the empty database of the other engine, and compare all rows.

    vhpcd must not run. Both databases are those of vhpc.toml: controller.database and the table
    [database]. The target has all rows afterwards, or none. Run it as vhpcd's user (controller.user),
    and then set database.engine in vhpc.toml.
    """
    from vhpc_slurm.cli.site import database as leasedatabase

    return leasedatabase.copy(options.config(), "sqlite" if to is Engine.SQLITE else "mariadb")
