# SPDX-License-Identifier: Apache-2.0
"""Options that several commands of `vhpc` have, and the configuration."""

from __future__ import annotations

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


def config() -> Config:
    """The configuration, loaded when a command needs it."""
    from vhpc_slurm.config import load

    return load()
