# SPDX-License-Identifier: Apache-2.0
"""HealthCheckProgram: reconcile the node, drain it when a repair fails, and tell what its jobs have used.

Slurm runs it before slurmd registers, then at intervals.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from vhpc_slurm.config import Config
from vhpc_slurm.controller.api.status_messages import MAX_REASON, DeviceWire
from vhpc_slurm.controller.client import ControllerClient
from vhpc_slurm.errors import NodeError, TeardownError, VhpcError
from vhpc_slurm.hooks import common
from vhpc_slurm.node.devices import quarantine
from vhpc_slurm.node.finding import Kind
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.reconcile import sofar
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
    _tell_quarantine(config, node)
    if bad:
        common.drain(config, node, TeardownError(bad[0].what, bad[0].error, "vhpc reconcile"))
    # last: guests may take their time to answer
    told = all(result.kind is not Kind.CONTROLLER for result in results)
    found = sofar.measure(Layout(config)) if told or config.host.metrics_folder else {}
    if config.host.metrics_folder:
        _write_metrics(config, results, found)
    if told:
        sofar.tell(ControllerClient(config, patient=False), node, found)
    return 1 if bad else 0


def _tell_quarantine(config: Config, node: str) -> None:
    """Tell vhpcd of devices in quarantine, for its status; again each time, because vhpcd forgets them.

    A node that has none tells it once, and one that never had any asks nothing.
    """
    layout = Layout(config)
    try:
        records = quarantine.read_records(layout)
        if not records and not layout.quarantine_told.exists():
            return
        layout.quarantine_told.touch(mode=0o600)
        devices = [
            DeviceWire(
                address=one.key, role=one.device_class, reason=one.reason[:MAX_REASON], since=one.since
            )
            for one in records
        ]
        ControllerClient(config, patient=False).report_quarantine(node, devices)
        if not records:
            layout.quarantine_told.unlink()
    except (VhpcError, OSError) as err:
        what = err.line() if isinstance(err, VhpcError) else str(err)
        common.log.warning("cannot tell vhpcd of devices in quarantine: %s", what)


def _write_metrics(config: Config, results: list[RepairResult], found: sofar.Measured) -> None:
    """A node without metrics is as good as others for jobs."""
    from vhpc_slurm.hooks import textfile

    layout = Layout(config)
    try:
        textfile.write(Path(config.host.metrics_folder), layout, results, sofar.gpus(layout, found))
    except NodeError as err:
        common.log.warning("%s", err.line())


def entry() -> int:
    """Process entry point."""
    return common.main("healthcheck", run)


if __name__ == "__main__":
    sys.exit(entry())
