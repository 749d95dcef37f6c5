# SPDX-License-Identifier: Apache-2.0
"""HealthCheckProgram: reconcile the node, and drain it when a repair fails.

Slurm runs it before slurmd registers, then at intervals.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from vhpc_slurm.config import Config
from vhpc_slurm.errors import NodeError, TeardownError
from vhpc_slurm.hooks import common
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.reconcile.finding import RepairResult
from vhpc_slurm.reconcile.run import reconcile


def run(config: Config) -> int:
    """Repair what can be repaired, and drain the node for the rest."""
    node = os.environ.get("SLURMD_NODENAME") or os.uname().nodename.partition(".")[0]
    bad = []
    results = reconcile(config, node, check=False)
    for result in results:
        common.log.warning("%s: %s%s", result.kind, result.what, " (repaired)" if result.repaired else "")
        if result.drains:
            bad.append(result)
    if config.host.metrics_folder:
        _write_metrics(config, results)
    if bad:
        common.drain(config, node, TeardownError(bad[0].what, bad[0].error, "vhpc reconcile"))
        return 1
    return 0


def _write_metrics(config: Config, results: list[RepairResult]) -> None:
    """A node without metrics is as good as others for jobs."""
    from vhpc_slurm.hooks import textfile

    try:
        textfile.write(Path(config.host.metrics_folder), Layout(config), results)
    except NodeError as err:
        common.log.warning("%s", err.line())


def entry() -> int:
    """Process entry point."""
    return common.main("healthcheck", run)


if __name__ == "__main__":
    sys.exit(entry())
