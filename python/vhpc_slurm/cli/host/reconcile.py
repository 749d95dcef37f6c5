# SPDX-License-Identifier: Apache-2.0
"""vhpc reconcile: print the findings of the reconciliation of this node, and the repairs."""

from __future__ import annotations

from typing import Annotated

import typer

from vhpc_slurm.cli import context, options, output
from vhpc_slurm.cli.options import Json, ThisNode
from vhpc_slurm.reconcile.run import reconcile as run


def reconcile(
    check: Annotated[
        bool, typer.Option("--check", help="Change nothing; exit 1 when there is a finding.")
    ] = False,
    node: ThisNode = None,
    as_json: Json = False,
) -> int:
    """Repair what a crash left on this node (root).

    Compares journals, libvirt, processes and vhpcd's leases.  The exit status
    is 0 when there is no finding or all are repaired, else 1.
    """
    config, name = options.config(), context.node_name(node)
    context.need_root("reconcile")
    results = run(config, name, check=check)
    if as_json:
        output.write_json(
            [
                {"kind": one.kind, "what": one.what, "repaired": one.repaired, "error": one.error}
                for one in results
            ]
        )
    elif not results:
        print(f"{name} is clean")
    else:
        output.write_table(
            ("KIND", "FOUND", "REPAIRED", "ERROR"),
            [(o.kind, o.what, "yes" if o.repaired else "no", o.error) for o in results],
        )
    left = [result for result in results if check or not result.repaired]
    return 1 if left else 0
