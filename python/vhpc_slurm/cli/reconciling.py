"""vhpc reconcile: what should not be on this node, and what became of it."""

from __future__ import annotations

from dataclasses import asdict

from vhpc_slurm.cli import here, output
from vhpc_slurm.config import Config
from vhpc_slurm.hooks.reconcile import reconcile as run


def reconcile(config: Config, node: str, *, check: bool, as_json: bool) -> int:
    """Mend, or with ``check`` only look.

    Returns 1 when something is left that should not be there, with ``check``
    when anything was found at all.
    """
    here.need_root("reconcile")
    outcomes = run(config, node, check=check)
    if as_json:
        output.write_json([asdict(outcome) for outcome in outcomes])
    elif not outcomes:
        print(f"{node} is clean")
    else:
        output.write_table(
            ("KIND", "FOUND", "MENDED", "ERROR"),
            [(o.kind, o.what, "yes" if o.mended else "no", o.error) for o in outcomes],
        )
    left = [outcome for outcome in outcomes if check or not outcome.mended]
    return 1 if left else 0
