# SPDX-License-Identifier: Apache-2.0
"""vhpc fabric manager: serves this host's OpenSM to a vhpcd on another host."""

from __future__ import annotations

import contextlib
import sys

import msgspec

from vhpc_slurm.cli import options
from vhpc_slurm.errors import FabricError
from vhpc_slurm.fabric import filewatch
from vhpc_slurm.fabric.filewatch import Watched
from vhpc_slurm.fabric.managers import serve
from vhpc_slurm.fabric.opensm import MAX_FILE, Opensm
from vhpc_slurm.fabric.select import local_opensm

MAX_LINE = 2 * MAX_FILE
"""Bytes of a request: base64 makes a file a third larger."""


def manager() -> int:
    """Serve this host's OpenSM to a vhpcd on another host: lines of JSON on stdin and stdout."""
    opensm = local_opensm(options.config().fabric)
    with contextlib.ExitStack() as stack:
        # Without the file watch, the auditor of vhpcd still checks the file at intervals.
        with contextlib.suppress(FabricError):
            watched = Watched(opensm.file, None, opensm.put_back)
            stack.enter_context(contextlib.closing(filewatch.start([watched], lambda: None)))
        _answer(opensm)
    return 0


def _answer(opensm: Opensm) -> None:
    while line := sys.stdin.buffer.readline(MAX_LINE):
        sys.stdout.buffer.write(msgspec.json.encode(serve(opensm, line)) + b"\n")
        sys.stdout.buffer.flush()
