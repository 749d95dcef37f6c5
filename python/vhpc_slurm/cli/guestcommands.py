# SPDX-License-Identifier: Apache-2.0
"""Commands of `vhpc` by which users work in guests: their arguments and help."""

from __future__ import annotations

from pathlib import Path
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
    from vhpc_slurm.cli.jobs import shell as interactive

    interactive.run(options.config(), image, ctx.args)


def save(
    job_id: JobId,
    target: Annotated[str, typer.Argument(metavar="[own/]NAME[:TAG]", show_default=False)],
    catalog: Catalog = None,
    as_json: Json = False,
) -> int:
    """Make an image of the files of a running job's first guest, without those of shared folders."""
    from vhpc_slurm.cli.jobs import save as saving

    config = options.config()
    return saving.run(config, options.catalog(config, catalog, target), job_id, target, as_json=as_json)


NodeOfJob = Annotated[
    str | None,
    typer.Option("--node", metavar="NODE", help="Node of the guest; default that of the batch script."),
]
GuestOfNode = Annotated[
    int, typer.Option("--guest", metavar="N", min=0, help="Number of the guest on its node, from 0.")
]


def forward(
    job_id: JobId,
    ports: Annotated[
        str,
        typer.Argument(metavar="[LOCAL:]PORT", help="Port here, and port of the guest.", show_default=False),
    ],
    node: NodeOfJob = None,
    guest: GuestOfNode = 0,
    path: Annotated[
        Path | None,
        typer.Option(
            "--socket", metavar="PATH", help="A unix socket that only you can open, in place of a port here."
        ),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option("--listen", metavar="ADDRESS", help="An address of this host in place of 127.0.0.1."),
    ] = None,
    clients: Annotated[
        list[str] | None,
        typer.Option(
            "--from",
            metavar="ADDRESS",
            help="Only this host may connect; may be repeated.",
            show_default=False,
        ),
    ] = None,
) -> int:
    """Connect a port of this host to a TCP port of a guest of your running job, until Ctrl-C.

    Programs of all users of this host can connect to a port, but not to a --socket; with --listen
    also programs of other hosts.
    """
    from vhpc_slurm.cli.jobs import forward as forwards

    door = forwards.Door.parse(path, address, clients or ())
    return forwards.run(options.config(), job_id, ports, node=node, guest=guest, door=door)


def cp(
    source: Annotated[str, typer.Argument(metavar="SRC", show_default=False)],
    target: Annotated[
        str,
        typer.Argument(metavar="DST", help="One of the two is JOBID[/NODE]:PATH.", show_default=False),
    ],
    guest: GuestOfNode = 0,
) -> int:
    """Copy a file or a folder into a guest of your running job, or out of it.

    A path in a guest is JOBID:PATH, or JOBID/NODE:PATH; without a slash it begins in your home.  As with
    cp -r, DST may be a folder.  Modes and times are kept.  - is standard input or output.
    """
    from vhpc_slurm.cli.jobs import cp as copy

    return copy.run(options.config(), source, target, guest=guest)


def complete(
    ctx: typer.Context,
    words: Annotated[list[str] | None, typer.Argument(metavar="[WORD]...", show_default=False)] = None,
) -> int:
    """Print what may stand in place of the last word of a command line, for completions/."""
    from vhpc_slurm.cli import complete as completion

    print("\n".join(completion.candidates(ctx.find_root().command, words or [""])))
    return 0
