# SPDX-License-Identifier: Apache-2.0
"""Snapshots of shared folders: whether guests of this node can use them."""

from __future__ import annotations

from collections.abc import Iterator

from vhpc_slurm.catalog import snapshots
from vhpc_slurm.cli import output
from vhpc_slurm.cli.host.checks import CheckResult, ok, warn
from vhpc_slurm.config import Config
from vhpc_slurm.errors import FabricError

CHECK = "shares.snapshots"


def check(config: Config) -> Iterator[CheckResult]:
    """A result for each folder of shares.snapshots."""
    for path in config.shares.snapshots:
        try:
            found = snapshots.current(config.images, path)
        except FabricError as err:
            yield warn(CHECK, f"guests get {path} through virtiofsd: {err.what}: {err.why}", err.hint)
            continue
        if found is None:
            yield warn(
                CHECK,
                f"guests get {path} through virtiofsd: it has no snapshot",
                f"vhpc share snapshot {path}",
            )
            continue
        yield ok(CHECK, f"guests mount {path} as it was on {output.date(found.began)}")
