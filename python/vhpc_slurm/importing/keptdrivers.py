# SPDX-License-Identifier: Apache-2.0
"""Drivers that a guest has although its root is from another image than its kernel."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from vhpc_slurm.bootfiles import newc
from vhpc_slurm.bootfiles.errors import BootFileError
from vhpc_slurm.bootfiles.modules import module_name

LOAD_LIST = "modules/load"
"""The file of the initrd with the modules that vhpc-init loads before it mounts the root."""


def kept(drivers: Mapping[str, str], initrd: Path) -> dict[str, str]:
    """Those drivers of an image of the site that its initrd loads; others are modules of its root.

    Args:
        drivers: of the image's manifest: name -> version.
        initrd: of the same image.
    """
    try:
        lines = newc.files(initrd.read_bytes()).get(LOAD_LIST, b"").decode("utf-8", "replace").split()
    except (OSError, BootFileError):  # an initrd of another form: what it loads is not known
        return {}
    loaded = {module_name(line.removeprefix("-")) for line in lines}
    return {driver: version for driver, version in drivers.items() if module_name(driver) in loaded}
