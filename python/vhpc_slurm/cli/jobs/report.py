# SPDX-License-Identifier: Apache-2.0
"""vhpc report: what is known of a job, as text, JSON or one HTML file."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vhpc_slurm.cli import leases, options, output
from vhpc_slurm.cli.jobs import reportdata, reportrows, runs, timeline, usagerows
from vhpc_slurm.cli.jobs.reportdata import JobReport
from vhpc_slurm.cli.options import JobId, Json
from vhpc_slurm.errors import UserError
from vhpc_slurm.model import JobUsage, LeaseRecord
from vhpc_slurm.terminal import printable

if TYPE_CHECKING:
    from vhpc_slurm.controller.client import ControllerClient

SHOWN_NODES = 32
"""Nodes whose stages the text shows; --json and --html have more."""


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
    found = gather(leases.client(options.config()), job_id)
    if found is None:
        raise leases.unknown(job_id)
    if as_json:
        output.write_json(reportdata.document(found))
    elif html is not None:
        _write_html(found, html)
    else:
        _show(found)
    return 0


def gather(client: ControllerClient, job_id: int) -> JobReport | None:
    """vhpcd's data about a job's last run, and a summary of all; None if it shows this user no such job.

    Raises:
        UserError: this user asks vhpcd too often.
        FabricError: vhpcd cannot be reached.
    """
    records, progress = client.of_job(job_id)
    record = leases.last(records)
    if record is None:
        return None
    booting = progress.get(str(record.lease.generation))
    every = runs.make(records, client.checkpoints(job_id), progress)
    return reportdata.make(record, client.reports(job_id), _usage(client, record), booting, every)


def _usage(client: ControllerClient, record: LeaseRecord) -> JobUsage | None:
    """The nodes' usage reports of this incarnation: while it runs, and when it ends."""
    try:
        page, nodes = client.usage(record.lease.generation.job_id, so_far=True)
    except UserError:
        return None
    return usagerows.of_job(page, nodes) if page.generation == str(record.lease.generation) else None


def _write_html(found: JobReport, target: str) -> None:
    from vhpc_slurm.cli.jobs import reporthtml

    text = reporthtml.render(found)
    if target == "-":
        sys.stdout.write(text)
        return
    path = Path(target)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        if path.exists() and not path.is_file():  # a device or a pipe is not replaced by a file
            path.write_text(text, encoding="utf-8")
            return
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as err:
        part.unlink(missing_ok=True)
        raise UserError(f"cannot write {target}", err.strerror or str(err)) from err


def _show(found: JobReport) -> None:
    output.write_facts(reportrows.facts(found))
    for table in runs.tables(found.runs):
        print()
        output.write_table(table.head, table.rows, right=runs.RIGHT)
    print()
    rows = reportrows.guest_rows(found)
    output.write_table(
        ("NODE", "GUEST", "OS CPUS", "MEMORY MiB", "CELLS", "DEVICES", "READY s"),
        rows,
        right=("GUEST", "MEMORY MiB", "READY s"),
    )
    shown = list(found.timelines.values())[:SHOWN_NODES]
    boots = [(line.node, line.boot) for line in shown]
    for title, lines in (("boot", boots), ("teardown", [(line.node, line.teardown) for line in shown])):
        if any(stages for _, stages in lines):
            print()
            timeline.waterfall(title, lines)
    if len(found.timelines) > SHOWN_NODES:
        print(f"the stages of {len(found.timelines) - SHOWN_NODES} more nodes are in --json and --html")
    if found.usage is not None:
        print()
        usagerows.table(found.usage)
        print(*usagerows.lines(found.usage), sep="\n")
    if said := reportdata.lines(found):
        print()
        for source, line in said:
            print(printable(f"{source}: {line}"))
