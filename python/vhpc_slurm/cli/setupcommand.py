# SPDX-License-Identifier: Apache-2.0
"""The command `vhpc setup`; cli/rolesetup.py implements it."""

from __future__ import annotations

from typing import Annotated

import typer

from vhpc_slurm.cli import options
from vhpc_slurm.cli.options import Json, ThisNode


def setup(
    role: Annotated[str, typer.Argument(metavar="node|controller|login", show_default=False)],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Change nothing; exit 1 when something is missing.")
    ] = False,
    node: ThisNode = None,
    as_json: Json = False,
) -> int:
    """Do what this host needs beside its packages, and show what is left (root).

    It may be repeated.  The exit status is 1 when something is left to do, 3 when a step failed.
    """
    from vhpc_slurm.cli import context
    from vhpc_slurm.cli.host import setup as rolesetup

    if role not in [known.value for known in rolesetup.Role]:
        raise typer.BadParameter(f"{role!r} is not one of: node, controller, login")
    return rolesetup.setup(
        options.config(), rolesetup.Role(role), context.node_name(node), dry_run=dry_run, as_json=as_json
    )
