# SPDX-License-Identifier: Apache-2.0
"""vhpc console: the output of a guest's serial console, of root on its node, of a user by a step of the job.

The text comes from a guest, where the user is root: it must not be able to
control the terminal of the operator who reads it.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import re
import select
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Annotated

import typer

from vhpc_slurm import slurm
from vhpc_slurm.cli import context, leases, options, output
from vhpc_slurm.cli.jobs import bootline
from vhpc_slurm.cli.options import JobId, Json
from vhpc_slurm.config import Config
from vhpc_slurm.errors import UserError, VhpcError
from vhpc_slurm.model import Lease, LeaseState
from vhpc_slurm.node.guest.console import LEFT_OUT, read_on
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.slurm.port import NoSuchJobError, SlurmError
from vhpc_slurm.terminal import printable

CHUNK = 1 << 16
POLL_S = 0.2
PROGRAM = "vhpc-console"
"""A task of this name runs on the node: vhpc-run prints a guest's console (guest/run/console.c)."""
NOTHING = (
    "no text from job {} yet: Slurm has not started the step that reads the console, or the guest has "
    "written nothing to it"
)
ASK_S = 3.0
"""Seconds without output after which the user is told why."""
# ECMA-48 sequences that colour boot messages; removed whole, because their
# printable part would stay in the text.
_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[ -/]*[0-Z\\^-~])")


class Cleaner:
    """Turns a console's bytes into text that is safe on a terminal, piece by piece."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""

    def feed(self, raw: bytes, *, last: bool = False) -> str:
        """Text of the next piece; an escape sequence or line end cut at its end is kept for the next."""
        text = self._held + self._decoder.decode(raw, final=last)
        cut = len(text) if last else _whole(text)
        text, self._held = text[:cut], text[cut:]
        text = _ESCAPE.sub("", text).replace("\r\n", "\n").replace("\r", "\n")
        return printable(text, keep="\n\t")


def _whole(text: str) -> int:
    """Where to cut without splitting a CR LF or an escape sequence; sequences have at most 32 characters."""
    start = text.rfind("\x1b", max(0, len(text) - 32))
    if start >= 0 and _ESCAPE.match(text, start) is None:
        return start
    return len(text) - 1 if text.endswith("\r") else len(text)


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
    if context.is_root():
        return _on_this_node(options.config(), job_id, node, guest, follow=follow, as_json=as_json)
    return _by_step(options.config(), job_id, node, guest, follow=follow, as_json=as_json)


def _on_this_node(
    config: Config, job_id: int, node: str | None, guest: int, *, follow: bool, as_json: bool
) -> int:
    """Print the console of a job's guest on this node.

    Raises:
        UserError: the guest is on another node, which the error names.
    """
    layout, this_node = Layout(config), context.node_name()
    path = layout.guest(job_id, guest) / "console.log"
    if (node is not None and node != this_node) or not path.exists():
        raise _elsewhere(config, job_id, node, this_node, guest)
    if as_json:
        text = "".join(_pieces_of_file(path, follow=False))
        output.write_json({"job": job_id, "node": this_node, "guest": guest, "console": text})
        return 0
    for piece in _pieces_of_file(path, follow=follow):
        sys.stdout.write(piece)
        sys.stdout.flush()
    return 0


def _pieces_of_file(path: Path, *, follow: bool) -> Iterator[str]:
    """The cleaned text; with ``follow`` until the job's Epilog removes the file."""
    cleaner = Cleaner()
    # QEMU's uid owns the file but not the folder; follow no link anyway.
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        while True:
            skipped, raw = read_on(fd, CHUNK)
            if raw:
                yield cleaner.feed((LEFT_OUT % skipped if skipped else b"") + raw)
            elif not follow or os.fstat(fd).st_nlink == 0:
                break
            else:
                time.sleep(POLL_S)
        yield cleaner.feed(b"", last=True)
    finally:
        os.close(fd)


def _elsewhere(config: Config, job_id: int, node: str | None, this_node: str, guest: int) -> UserError:
    """The error that names the node of the console, or the reason why no console exists."""
    nodes, meant = _nodes_of(config, job_id), node or this_node
    if nodes and meant not in nodes:
        return UserError(
            f"job {job_id} has no guest on {meant}",
            f"its nodes are {output.node_list(nodes)}",
            f"run on one of them: vhpc console {job_id}",
        )
    if meant != this_node:
        return UserError(
            f"the console of job {job_id} on {meant} can only be read on {meant}",
            f"this host is {this_node}",
            f"run on {meant}: vhpc console {job_id}",
        )
    return UserError(
        f"guest {guest} of job {job_id} has no console on {this_node}",
        "its guests have not started, or the job has ended",
        "sbatch --vhpc-console=PATH keeps a console after the end of the job",
    )


def _nodes_of(config: Config, job_id: int) -> list[str]:
    """The job's nodes from vhpcd; empty when vhpcd does not answer, because they are only for a hint."""
    try:
        record = leases.of_job(config, job_id)
    except VhpcError:
        return []
    return [part.node for part in record.lease.allocation.nodes] if record else []


def _by_step(
    config: Config, job_id: int, node: str | None, guest: int, *, follow: bool, as_json: bool
) -> int:
    """Print the console of a guest of the user's running job.

    Raises:
        UserError: no such job of the user, it does not run, it has no such guest, or Slurm refuses the step.
        FabricError: vhpcd or Slurm cannot be reached.
    """
    record = leases.of_job(config, job_id)
    if record is None:
        raise leases.unknown(job_id)
    where = _place(record.lease, node, guest)
    pieces = _pieces_of_step(config, job_id, where, guest, follow=follow)
    if as_json:
        output.write_json({"job": job_id, "node": where, "guest": guest, "console": "".join(pieces)})
        return 0
    try:
        for piece in pieces:
            sys.stdout.write(piece)
            sys.stdout.flush()
    except UserError:
        if not (follow and _has_ended(config, job_id)):
            raise
    return 0


def _has_ended(config: Config, job_id: int) -> bool:
    """Whether the step ended because its job did: Slurm ends the steps before the Epilog."""
    try:
        return slurm.user_jobs(config).state(job_id).state not in ("RUNNING", "SUSPENDED")
    except NoSuchJobError:
        return True
    except SlurmError:
        return False


def _place(lease: Lease, node: str | None, guest: int) -> str:
    """The node of the guest; UserError if the job has no such guest now."""
    job_id, names = lease.generation.job_id, lease.allocation.node_names
    if lease.state is LeaseState.REFUSED:
        raise UserError(f"job {job_id} has no guests", lease.refusal)
    if lease.state not in (LeaseState.RESERVED, LeaseState.READY):
        raise UserError(
            f"job {job_id} has ended",
            "consoles are on its nodes while it runs",
            "sbatch --vhpc-console=PATH keeps them after the end of the job",
        )
    if node is not None and node not in names:
        raise UserError(f"job {job_id} has no guest on {node}", f"its nodes are {output.node_list(names)}")
    if guest >= lease.request.guests_per_node:
        raise UserError(
            f"job {job_id} has no guest {guest} on a node",
            f"it has {lease.request.guests_per_node} on each, counted from 0",
        )
    return node or names[0]


def _pieces_of_step(config: Config, job_id: int, node: str, guest: int, *, follow: bool) -> Iterator[str]:
    """The cleaned text of the console as the step prints it."""
    command = [PROGRAM, str(guest), *(["follow"] if follow else [])]
    cleaner = Cleaner()
    with slurm.user_jobs(config).step(job_id, command, node) as out:
        _wait(config, job_id, out)
        while raw := os.read(out.fileno(), CHUNK):
            yield cleaner.feed(raw)
    yield cleaner.feed(b"", last=True)


def _wait(config: Config, job_id: int, out: IO[bytes]) -> None:
    """Wait for the step's first output, and say on stderr why there is none yet.

    Slurm starts the step after the Prolog; a guest with a quiet kernel may write nothing at all.
    """
    said, said_at = "", 0.0
    while not select.select([out], [], [], ASK_S)[0]:
        what = _waits_for(config, job_id)
        plain, now = bootline.without_seconds(what), time.monotonic()
        if plain == said and (what == NOTHING.format(job_id) or now - said_at < bootline.AGAIN_S):
            continue
        print(f"vhpc: {what}", file=sys.stderr, flush=True)
        said, said_at = plain, now


def _waits_for(config: Config, job_id: int) -> str:
    record, progress = None, None
    with contextlib.suppress(VhpcError):  # this line is only to inform
        records, booting = leases.client(config).booting(job_id=job_id)
        record = leases.last(records)
        if record is not None:
            progress = booting.get(str(record.lease.generation))
    if record is None or progress is None:
        return NOTHING.format(job_id)
    line = bootline.line(record.lease.request.guests_per_node, progress)
    return f"job {job_id} boots, and its consoles can be read when all guests are ready: {line}"
