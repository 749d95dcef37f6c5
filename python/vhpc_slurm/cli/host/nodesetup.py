# SPDX-License-Identifier: Apache-2.0
"""vhpc node-setup: prepare a node at each boot, before slurmd starts."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from vhpc_slurm.cli import context, options, output
from vhpc_slurm.cli.options import Json
from vhpc_slurm.node.devices import setup
from vhpc_slurm.node.resource import reservations
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.placement.usage import fold

EXIT_NODE = 3


def node_setup(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Change nothing; exit 1 when something is missing.")
    ] = False,
    as_json: Json = False,
) -> int:
    """Create virtual functions, pools of huge pages, and /dev/vhpc/gpuN for gres.conf (root).

    Existing ones are not changed.  The unit vhpc-node-setup.service
    runs this at boot, before slurmd.  The exit status is 3 when a step failed.
    """
    config = options.config()
    context.need_root("node-setup")
    layout = Layout(config)
    with reservations.plan_lock(layout, config.guests.stage_timeout_s):
        done = list(setup.steps(layout, fold(reservations.live(layout)).devices, dry_run=dry_run))
    if as_json:
        output.write_json([asdict(step) for step in done])
    elif not done:
        print("nothing to set up: no GPU map, and devices.virtual_functions and host.hugepages are empty")
    else:
        output.write_table(
            ("KIND", "WHAT", "STATE", "ERROR"), [(s.kind, s.what, s.state, s.error) for s in done]
        )
    if any(step.state is setup.State.FAILED for step in done):
        return EXIT_NODE
    return 1 if any(step.state is setup.State.MISSING for step in done) else 0
