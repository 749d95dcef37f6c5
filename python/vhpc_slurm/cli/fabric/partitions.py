# SPDX-License-Identifier: Apache-2.0
"""vhpc fabric render, lint: OpenSM's partitions file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from vhpc_slurm.cli import options, output
from vhpc_slurm.cli.fabric.keys import patience_s
from vhpc_slurm.cli.options import Json
from vhpc_slurm.config import Config
from vhpc_slurm.controller.client import ControllerClient
from vhpc_slurm.controller.store.choice import read_keys
from vhpc_slurm.errors import FabricError, UserError
from vhpc_slurm.fabric import keys, partitions, plainfile
from vhpc_slurm.fabric.select import site_partitions, static_pool
from vhpc_slurm.terminal import printable

MAX_FILE = 256 << 20
"""Bytes of the largest partitions file that is read; a pool of a million GUIDs has 26 MB."""


def render(
    pool: Annotated[
        bool,
        typer.Option("--pool", help="The file of the static pool: all keys, from the configuration."),
    ] = False,
    install: Annotated[
        bool,
        typer.Option("--install", help="Print nothing: vhpcd writes the file, and OpenSM reads it."),
    ] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="With --install: even if this removes keys that vhpcd's database does not have.",
        ),
    ] = False,
    as_json: Json = False,
) -> int:
    """Print the partitions file for the keys in use (root, on vhpcd's host)."""
    if (install and pool) or (force and not install):
        raise typer.BadParameter("--force needs --install, and --pool excludes both")
    config = options.config()
    if install:
        return _install(config, force=force, as_json=as_json)
    fabric = config.fabric
    snapshot = keys.KeySnapshot(0) if pool else read_keys(config)
    found = static_pool(fabric) if pool else partitions.of_snapshot(snapshot, ipoib=fabric.ipoib)
    found = (*found, *site_partitions(fabric))
    if as_json:
        output.write_json(
            {
                "epoch": snapshot.epoch,
                "partitions": [
                    {
                        "name": one.name,
                        "pkey": f"{one.pkey:#06x}",
                        "flags": one.flags,
                        "members": {member: "full" if full else "limited" for member, full in one.members},
                    }
                    for one in found
                ],
            }
        )
        return 0
    sys.stdout.write(partitions.render(found, snapshot.epoch, snapshot.tag).decode())
    return 0


def _install(config: Config, *, force: bool, as_json: bool) -> int:
    """Let vhpcd write all keys in use to the fabric again."""
    ControllerClient(config).tell_fabric(force=force, wait_s=patience_s(config))
    if as_json:
        output.write_json({"told": True})
    else:
        print("vhpcd wrote the keys in use to the fabric")
    return 0


def lint(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A partitions file.", show_default=False)],
    as_json: Json = False,
) -> int:
    """Check a partitions file for lines that OpenSM rejects or misreads; exit 1 if there is one."""
    defects = partitions.lint(_read(file))
    if as_json:
        output.write_json({"file": file, "defects": defects})
    else:
        for defect in defects:
            print(f"{printable(file)}:{defect.line}: {printable(defect.reason)}")
    return 1 if defects else 0


def _read(file: str) -> bytes:
    try:
        data = plainfile.read_file(Path(file), MAX_FILE)
    except FabricError as err:
        raise UserError(err.what, err.why) from err
    if data is None:
        raise UserError(f"cannot read {file}", "No such file or directory")
    return data
