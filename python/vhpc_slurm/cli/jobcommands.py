# SPDX-License-Identifier: Apache-2.0
"""Commands of `vhpc` by which users look at their jobs: their arguments and help."""

from __future__ import annotations

from typing import Annotated

import typer

from vhpc_slurm.cli import options
from vhpc_slurm.cli.options import JobId, Json


def console(
    job_id: JobId,
    node: Annotated[
        str | None,
        typer.Argument(
            metavar="NODE", help="Node of the guest; default the job's first, for root this node."
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Continue until the job ends or you press Ctrl-C.")
    ] = False,
    guest: Annotated[
        int,
        typer.Option("--guest", metavar="N", min=0, help="Index of the guest on its node, from 0."),
    ] = 0,
    as_json: Json = False,
) -> int:
    """Print what a guest of your running job wrote to its console, by a step of the job.

    Root reads the consoles of this node instead. Control characters are removed.
    """
    if follow and as_json:
        raise typer.BadParameter("--follow and --json exclude each other")
    from vhpc_slurm.cli import context
    from vhpc_slurm.cli.jobs import console as consoles
    from vhpc_slurm.cli.jobs import userconsole

    config = options.config()
    if not context.is_root():
        return userconsole.console(config, job_id, node, guest, follow=follow, as_json=as_json)
    return consoles.console(
        config,
        job_id,
        node=node,
        this_node=context.node_name(),
        guest=guest,
        follow=follow,
        as_json=as_json,
    )


def report(
    job_id: JobId,
    html: Annotated[
        str | None,
        typer.Option(
            "--html", metavar="FILE", help="Write one HTML file; - is standard output.", show_default=False
        ),
    ] = None,
    as_json: Json = False,
) -> int:
    """Show what is known of a job: image, nodes, guests, devices, network, boot, and what was said.

    It is kept for controller.history_days after the end of the job.
    """
    if html is not None and as_json:
        raise typer.BadParameter("--html and --json exclude each other")
    from vhpc_slurm.cli.jobs import report as reports

    return reports.report(options.config(), job_id, html=html, as_json=as_json)


def boot_watch(
    waiter: Annotated[str, typer.Argument(metavar="WORD", show_default=False)],
    pid: Annotated[int, typer.Argument(metavar="PID", min=1, show_default=False)],
) -> int:
    """Print on stderr how far the job is that srun or salloc waits for; the SPANK plugin runs this."""
    from vhpc_slurm.cli.jobs import bootline

    return bootline.watch(options.config(), waiter, pid)
