# SPDX-License-Identifier: Apache-2.0
"""HealthCheckProgram: reconcile the node, and drain it when a repair fails.

Slurm runs it before slurmd registers, then at intervals.
"""

from __future__ import annotations

import os
import sys

from vhpc_slurm.config import Config
from vhpc_slurm.errors import TeardownError
from vhpc_slurm.hooks import common
from vhpc_slurm.reconcile.run import reconcile


def run(config: Config) -> int:
    """Repair what can be repaired, and drain the node for the rest."""
    node = os.environ.get("SLURMD_NODENAME") or os.uname().nodename.partition(".")[0]
    bad = []
    for result in reconcile(config, node, check=False):
        common.log.warning("%s: %s%s", result.kind, result.what, " (repaired)" if result.repaired else "")
        if result.drains:
            bad.append(result)
    if bad:
        common.drain(config, node, TeardownError(bad[0].what, bad[0].error, "vhpc reconcile"))
        return 1
    return 0


def entry() -> int:
    """Process entry point."""
    return common.main("healthcheck", run)


if __name__ == "__main__":
    sys.exit(entry())
