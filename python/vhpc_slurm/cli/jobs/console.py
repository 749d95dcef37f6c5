# SPDX-License-Identifier: Apache-2.0
"""vhpc console: the output of a guest's serial console.

The text comes from a guest, where the user is root: it must not be able to
control the terminal of the operator who reads it.
"""

from __future__ import annotations

import codecs
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from vhpc_slurm.cli import context, output
from vhpc_slurm.cli.jobs import ps as jobs
from vhpc_slurm.config import Config
from vhpc_slurm.errors import UserError, VhpcError
from vhpc_slurm.node.guest.console import LEFT_OUT, read_on
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.terminal import printable

CHUNK = 1 << 16
POLL_S = 0.2
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
    config: Config, job_id: int, *, node: str | None, this_node: str, guest: int, follow: bool, as_json: bool
) -> int:
    """Print the console of a job's guest on this node.

    Raises:
        UserError: not root, or the guest is on another node, which the error names.
    """
    context.need_root("console")
    layout = Layout(config)
    path = layout.guest(job_id, guest) / "console.log"
    if (node is not None and node != this_node) or not path.exists():
        raise _elsewhere(config, job_id, node, this_node, guest)
    if as_json:
        text = "".join(_pieces(path, follow=False))
        output.write_json({"job": job_id, "node": this_node, "guest": guest, "console": text})
        return 0
    for piece in _pieces(path, follow=follow):
        sys.stdout.write(piece)
        sys.stdout.flush()
    return 0


def _pieces(path: Path, *, follow: bool) -> Iterator[str]:
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
        record = jobs.of_job(config, job_id)
    except VhpcError:
        return []
    return [part.node for part in record.lease.allocation.nodes] if record else []
