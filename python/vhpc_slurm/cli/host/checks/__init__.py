# SPDX-License-Identifier: Apache-2.0
"""The checks of `vhpc doctor`: one module per subject, each yields results.

Those of job networks, nat, the bridge of the site, disks and uids are in the classes of ``node.resource``.
"""

from __future__ import annotations

from vhpc_slurm.node.checked import CheckResult, Level, error, ok, warn

__all__ = ["CheckResult", "Level", "error", "ok", "warn"]
