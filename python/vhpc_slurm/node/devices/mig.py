# SPDX-License-Identifier: Apache-2.0
"""MIG mode of a whole GPU: its user may have turned it on, and the next one must not find it.

On GA100 (A100, A30) the mode survives each reset.  NVIDIA's tool reads it from the GPU's registers,
without a driver, and can end it with the next reset.  The mode of later GPUs ends with each reset.

Sources: NVIDIA Multi-Instance GPU User Guide; github.com/NVIDIA/gpu-admin-tools: cli/per_gpu.py
("MIG mode is enabled"), issue 2 (H100).
"""

from __future__ import annotations

import re
from collections.abc import Callable

from vhpc_slurm.device import NVIDIA
from vhpc_slurm.errors import NodeError
from vhpc_slurm.node.devices import scrub
from vhpc_slurm.node.devices.device_class import NotCleanError
from vhpc_slurm.node.devices.preflight import device_path
from vhpc_slurm.node.host import sysfs
from vhpc_slurm.node.host.attribute import Until

GA100 = range(0x2080, 0x2100)
"""Device ids of GPUs whose MIG mode survives each reset."""
_MODE = re.compile(r"MIG mode is (enabled|disabled)")


def lasts(vendor: int, device: int) -> bool:
    """Whether the MIG mode of this GPU survives a reset."""
    return vendor == NVIDIA and device in GA100


def is_on(address: str, until: Until) -> bool:
    """Whether MIG mode is on; NotCleanError if the tool cannot read it."""
    failed = f"MIG mode of GPU {address} was not read"
    said = scrub.run((scrub.tool(), f"--gpu-bdf={address}", "--query-mig-mode"), failed, until)
    found = _MODE.search(said)
    if found is None:
        raise NotCleanError(failed, f"{scrub.TOOL} does not print it")
    return found[1] == "enabled"


def end(root: str, address: str, until: Until, reset: Callable[[], None]) -> None:
    """End the MIG mode of a GPU where it survives a reset, if NVIDIA's tool is installed.

    Args:
        root: path of sysfs.
        address: of the GPU, which has just been reset.
        until: deadline of the tool.
        reset: resets the GPU once more; raises if that fails.

    Raises:
        NotCleanError: MIG mode is still on, or cannot be read.
    """
    if not _can_be_read(root, address) or not is_on(address, until):
        return
    force = (scrub.tool(), f"--gpu-bdf={address}", "--force-mig-off-after-reset")
    scrub.run(force, f"MIG mode of GPU {address} was not turned off", until)
    reset()
    if is_on(address, until):
        raise NotCleanError(f"MIG mode of GPU {address} is still on", "it survived a reset", "see dmesg")


def check(root: str, address: str, until: Until) -> None:
    """Check that a GPU for an NVSwitch partition is not in MIG mode.

    Raises:
        NodeError: it is, or the tool cannot read it.
    """
    try:
        if _can_be_read(root, address) and is_on(address, until):
            raise NodeError(
                f"GPU {address} is in MIG mode",
                "MIG and NVSwitch partitions exclude each other",
                f"{scrub.TOOL} --gpu-bdf={address} --force-mig-off-after-reset, then reset it",
            )
    except NotCleanError as err:
        raise NodeError(err.what, err.why, err.hint) from err


def _can_be_read(root: str, address: str) -> bool:
    ids = [sysfs.text_or_empty(f"{device_path(root, address)}/{name}") for name in ("vendor", "device")]
    return all(ids) and lasts(*(int(text, 16) for text in ids)) and bool(scrub.tool())
