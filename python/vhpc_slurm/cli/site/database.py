# SPDX-License-Identifier: Apache-2.0
"""vhpc database copy: vhpcd's leases from one engine to the other."""

from __future__ import annotations

import os
import pwd
from enum import StrEnum
from typing import Annotated, Literal

import msgspec
import typer

from vhpc_slurm.cli import options
from vhpc_slurm.config import Config
from vhpc_slurm.controller.store import choice, copying
from vhpc_slurm.errors import NodeError, UserError


class Engine(StrEnum):
    """An engine; typer 0.15 of Debian 13 does not know ``typing.Literal``."""

    SQLITE = "sqlite"
    MARIADB = "mariadb"


def copy(
    to: Annotated[Engine, typer.Option("--to", help="Engine of the target.", show_default=False)],
) -> int:
    """Copy all leases into the empty database of the other engine, and compare all rows.

    vhpcd must not run. Both databases are those of vhpc.toml: controller.database and the table
    [database]. The target has all rows afterwards, or none. Run it as vhpcd's user (controller.user),
    and then set database.engine in vhpc.toml.
    """
    return migrate(options.config(), "sqlite" if to is Engine.SQLITE else "mariadb")


def migrate(config: Config, to: Literal["sqlite", "mariadb"]) -> int:
    """Copy all leases to the engine ``to``; UserError unless vhpcd's user runs it."""
    _only_vhpcds_user(config.controller.user)
    other: Literal["sqlite", "mariadb"] = "mariadb" if to == "sqlite" else "sqlite"
    source, target = _with(config, other), _with(config, to)
    counts = copying.migrate(source, target)
    print(f"copied from the {choice.name(source)} to the {choice.name(target)}, and compared:")
    for table, count in counts.items():
        print(f"{count:8} {table}")
    if config.database.engine != to:
        print(f'next: set engine = "{to}" in the table [database] of vhpc.toml, and start vhpcd')
    return 0


def _with(config: Config, engine: Literal["sqlite", "mariadb"]) -> Config:
    return msgspec.structs.replace(config, database=msgspec.structs.replace(config.database, engine=engine))


def _only_vhpcds_user(name: str) -> None:
    try:
        user = pwd.getpwnam(name)
    except KeyError:
        raise NodeError(f"there is no user {name!r}", "controller.user of vhpc.toml names it") from None
    if os.geteuid() != user.pw_uid:
        raise UserError(
            f"vhpc database copy must run as {name}",
            "the files of the database belong to this user, and the server may know the user by its name",
            f"runuser -u {name} -- vhpc database copy …",
        )
