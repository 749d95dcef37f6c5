# SPDX-License-Identifier: Apache-2.0
"""All device classes of a node."""

from __future__ import annotations

from vhpc_slurm.errors import TeardownError
from vhpc_slurm.node.devices.device_class import DeviceClass
from vhpc_slurm.node.devices.mdev import Mdev
from vhpc_slurm.node.devices.pci_function import Gpu, VirtualFunction
from vhpc_slurm.node.devices.vgpu import Vgpu
from vhpc_slurm.node.store.layout import Layout

CLASSES: dict[str, DeviceClass] = {one.traits.name: one for one in (Gpu(), VirtualFunction(), Mdev(), Vgpu())}
"""By their names."""


def of(name: str) -> DeviceClass:
    """A class by its name; TeardownError if this version does not have it."""
    try:
        return CLASSES[name]
    except KeyError:
        raise TeardownError(
            f"this version has no device class {name!r}",
            "a newer vhpc has written it",
            "install the version that wrote it again, then run: vhpc reconcile",
        ) from None


def parents(layout: Layout) -> tuple[tuple[str, str], ...]:
    """Key and PCI address of the parent of each device that is not a PCI function, of all classes."""
    return tuple(pair for one in CLASSES.values() for pair in one.parents(layout))
