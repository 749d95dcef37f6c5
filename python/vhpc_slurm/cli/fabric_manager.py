# SPDX-License-Identifier: Apache-2.0
"""vhpc fabric manager: the other end of a vhpcd whose OpenSM runs on another host."""

from __future__ import annotations

import contextlib
import sys

import msgspec

from vhpc_slurm.config import Config
from vhpc_slurm.errors import FabricError
from vhpc_slurm.fabric import filewatch
from vhpc_slurm.fabric.filewatch import Watched
from vhpc_slurm.fabric.managers import serve
from vhpc_slurm.fabric.opensm import MAX_FILE, Opensm
from vhpc_slurm.fabric.select import local_opensm

MAX_LINE = 2 * MAX_FILE
"""Bytes of a request: a file takes a third more than it has."""


def manager(config: Config) -> int:
    """Answer each line on stdin with one on stdout, until there is no more."""
    opensm = local_opensm(config.fabric)
    with contextlib.ExitStack() as stack:
        # Without it there is the auditor of vhpcd, which looks at intervals.
        with contextlib.suppress(FabricError):
            watched = Watched(opensm.file, None, opensm.put_back)
            stack.enter_context(contextlib.closing(filewatch.start([watched], lambda: None)))
        _answer(opensm)
    return 0


def _answer(opensm: Opensm) -> None:
    while line := sys.stdin.buffer.readline(MAX_LINE):
        sys.stdout.buffer.write(msgspec.json.encode(serve(opensm, line)) + b"\n")
        sys.stdout.buffer.flush()
