# SPDX-License-Identifier: Apache-2.0
"""Needs of guests' disks (--vhpc-disk) on a compute node: the folder, its space, the programs."""

from __future__ import annotations

import os
from collections.abc import Iterator

from vhpc_slurm.cli.host.checks import CheckResult, error, ok, warn
from vhpc_slurm.config import Config
from vhpc_slurm.errors import VhpcError
from vhpc_slurm.node.store import disks
from vhpc_slurm.node.store.layout import Layout


def check(config: Config, *, root: bool) -> Iterator[CheckResult]:
    """Results where the site gives guests disks; the folder is tried by root only."""
    most = config.disks.max_mib
    if most == 0:
        return
    absent = [program for program in (disks.FALLOCATE, disks.MKFS) if not os.access(program, os.X_OK)]
    if absent:
        what = f"{' and '.join(absent)} not found: jobs with --vhpc-disk fail here, and drain this node"
        yield error("disks.programs", what, "apt install util-linux e2fsprogs")
    if not root:
        yield warn("disks.folder", "disks.folder was not tried", "run vhpc doctor as root")
        return
    try:
        space_mib = disks.free_mib(Layout(config))
    except VhpcError as err:
        what = f"{err.line()}: jobs with --vhpc-disk fail here, and drain this node"
        yield error("disks.folder", what, err.hint)
        return
    text = f"{config.disks.folder} has {space_mib} MiB for disks of guests; a guest may ask for {most} MiB"
    if space_mib < most:
        yield warn("disks.folder", text, "use a larger file system, or lower disks.max_mib")
    else:
        yield ok("disks.folder", text)
