# SPDX-License-Identifier: Apache-2.0
"""vhpc reconcile: what should not be on this node, and what became of it."""

from __future__ import annotations

from vhpc_slurm.cli import context, output
from vhpc_slurm.config import Config
from vhpc_slurm.hooks.reconcile import reconcile as run


def reconcile(config: Config, node: str, *, check: bool, as_json: bool) -> int:
    """Repair, or with ``check`` only look.

    Returns 1 when something is left that should not be there, with ``check``
    when anything was found at all.
    """
    context.need_root("reconcile")
    outcomes = run(config, node, check=check)
    if as_json:
        output.write_json(
            [
                {"kind": one.kind, "what": one.what, "mended": one.repaired, "error": one.error}
                for one in outcomes
            ]
        )
    elif not outcomes:
        print(f"{node} is clean")
    else:
        output.write_table(
            ("KIND", "FOUND", "REPAIRED", "ERROR"),
            [(o.kind, o.what, "yes" if o.repaired else "no", o.error) for o in outcomes],
        )
    left = [outcome for outcome in outcomes if check or not outcome.repaired]
    return 1 if left else 0
