# SPDX-License-Identifier: Apache-2.0
"""GPUs whose model needs care: AMD's that do not survive a reset, and those joined by XGMI.

Sources: github.com/amd/MxGPU-Virtualization, issue 25 (MI300X, MI355X: configuration space of the physical
function reads ff after a reset by VFIO until the host is rebooted; virtual functions of GIM do not); AMD SMI,
"GPU reset behavior on XGMI systems"; drivers/gpu/drm/amd/amdgpu/amdgpu_xgmi.c (xgmi_hive_info).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vhpc_slurm.cli.host.checks import CheckResult, warn
from vhpc_slurm.hardware import PciFunction
from vhpc_slurm.node.devices.preflight import device_path
from vhpc_slurm.node.host import sysfs

AMD = 0x1002
LOST_BY_RESET = frozenset((0x74A1, 0x75A3))
"""Device ids of MI300X and MI355X, physical functions."""
HIVE = "xgmi_hive_info/xgmi_hive_id"


def check(sysfs_root: str, gpus: Sequence[PciFunction]) -> Iterator[CheckResult]:
    """Results about whole GPUs of the GPU map; none if no model needs care."""
    lost = [one.address for one in gpus if one.vendor == AMD and one.device in LOST_BY_RESET]
    if lost:
        yield warn(
            "devices.reset",
            f"these AMD GPUs do not answer after a reset until the node is rebooted: {', '.join(lost)}",
            "list virtual functions of AMD's GIM driver in the map instead",
        )
    hives: dict[str, list[str]] = {}
    for one in gpus:
        hive = sysfs.text_or_empty(f"{device_path(sysfs_root, one.address)}/{HIVE}")
        if hive and not one.physfn:
            hives.setdefault(hive, []).append(one.address)
    joined = [", ".join(members) for members in hives.values() if len(members) > 1]
    if joined:
        yield warn(
            "devices.xgmi",
            f"joined by XGMI: {'; '.join(joined)}: the reset of one can interrupt jobs on the others",
            "give such GPUs to one job at a time: OverSubscribe=EXCLUSIVE in slurm.conf",
        )
