# SPDX-License-Identifier: Apache-2.0
"""vhpc reconcile: print the findings of the reconciliation of this node, and the repairs."""

from __future__ import annotations

from vhpc_slurm.cli import context, output
from vhpc_slurm.config import Config
from vhpc_slurm.reconcile.run import reconcile as run


def reconcile(config: Config, node: str, *, check: bool, as_json: bool) -> int:
    """Repair the findings, with ``check`` only report them.

    Returns 1 when a finding is not repaired, with ``check`` when there is any finding.
    """
    context.need_root("reconcile")
    results = run(config, node, check=check)
    if as_json:
        output.write_json(
            [
                {"kind": one.kind, "what": one.what, "repaired": one.repaired, "error": one.error}
                for one in results
            ]
        )
    elif not results:
        print(f"{node} is clean")
    else:
        output.write_table(
            ("KIND", "FOUND", "REPAIRED", "ERROR"),
            [(o.kind, o.what, "yes" if o.repaired else "no", o.error) for o in results],
        )
    left = [result for result in results if check or not result.repaired]
    return 1 if left else 0
