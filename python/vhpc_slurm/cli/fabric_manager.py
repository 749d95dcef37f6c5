"""vhpc fabric manager: the other end of a vhpcd whose OpenSM runs on another host."""

from __future__ import annotations

import sys

import msgspec

from vhpc_slurm.config import Config
from vhpc_slurm.fabric.managers import serve
from vhpc_slurm.fabric.opensm import MAX_FILE
from vhpc_slurm.fabric.select import local_opensm

MAX_LINE = 2 * MAX_FILE
"""Bytes of a request: a file takes a third more than it has."""


def manager(config: Config) -> int:
    """Answer each line on stdin with one on stdout, until there is no more."""
    opensm = local_opensm(config.fabric)
    while line := sys.stdin.buffer.readline(MAX_LINE):
        sys.stdout.buffer.write(msgspec.json.encode(serve(opensm, line)) + b"\n")
        sys.stdout.buffer.flush()
    return 0
