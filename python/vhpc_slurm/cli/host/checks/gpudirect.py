# SPDX-License-Identifier: Apache-2.0
"""GPUs of a node: the way to adapters, isolation below switches, large BARs, memory that is pinned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vhpc_slurm.cli.host.checks import CheckResult, error, ok, warn
from vhpc_slurm.device import HostDevice
from vhpc_slurm.hardware import PciFunction
from vhpc_slurm.model import HostInventory
from vhpc_slurm.node.devices import direct
from vhpc_slurm.node.host import pcie
from vhpc_slurm.placement.deadlines import HUGE_S_PER_GIB, ORDINARY_S_PER_GIB

SHOWN = 4


def check(
    sysfs_root: str, host: HostInventory, gpus: Sequence[HostDevice], vfs: Sequence[HostDevice], qemu: int
) -> Iterator[CheckResult]:
    """Results; none without devices for guests.

    Args:
        sysfs_root: path of sysfs.
        host: this node.
        gpus: whole GPUs of the GPU map.
        vfs: virtual functions for guests.
        qemu: version of QEMU; 0 if unknown.
    """
    switches = pcie.Switches(sysfs_root)
    reached = [switches.unguarded(one.place.address) for one in (*gpus, *vfs)]
    if ports := sorted({port for found in reached for port in found.values()}):
        yield error(
            "devices.acs",
            f"ACS is off or missing in {_names(ports)}: devices below a switch with them reach each other "
            "without the IOMMU, so they go to one job only, and to none while the host uses one",
            "remove what turns ACS off (setpci ... ECAP_ACS), and reboot the node",
        )
    cards = [one.place for one in gpus]
    if cards and vfs:
        physical = {one.place.physfn for one in vfs}
        yield way(cards, [one for one in host.pci if one.address in physical], direct.reader(sysfs_root))
    if slow := direct.slow_bars(cards, qemu):
        yield warn(
            "devices.bars",
            f"QEMU before 10.1 maps large BARs slowly: guests with some of {_names(slow)} boot for minutes",
            "install QEMU 10.1 or newer, with a host kernel and guest kernels of 6.14 or newer",
        )
    if cards and not any(total for cell in host.cells for _, total, _ in cell.hugepages):
        yield warn(
            "devices.hugepages",
            f"no huge pages are reserved: guests with GPUs wait up to {ORDINARY_S_PER_GIB} s for each GiB of "
            f"memory, with huge pages {HUGE_S_PER_GIB} s",
            "set host.hugepages",
        )


def way(gpus: Sequence[PciFunction], adapters: Sequence[PciFunction], read: direct.Reader) -> CheckResult:
    """Whether GPUs and adapters below one switch exchange data through it."""
    pairs = direct.pairs(gpus, adapters)
    if not pairs:
        return ok(
            "devices.gpudirect",
            "no GPU is below one PCI Express switch with an adapter: their data pass through the CPU",
        )
    found = [one for pair in pairs for one in direct.detours(pair, read)]
    reasons, hints = dict.fromkeys(one.why for one in found), dict.fromkeys(one.hint for one in found)
    near = len({pair.gpu for pair in pairs})
    if reasons:
        return warn(
            "devices.gpudirect",
            f"data between {near} GPUs and adapters below their switches pass through the CPU: "
            f"{_names([*reasons])}",
            "; ".join([*hints][:SHOWN]),
        )
    known = all(read(address) for pair in pairs for address in (pair.adapter, *pair.ports))
    state = "with ATS" if known else "their ACS and ATS cannot be read"
    return ok("devices.gpudirect", f"{near} of {len(gpus)} GPUs have adapters below their switches, {state}")


def _names(found: Sequence[str]) -> str:
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return ", ".join(found[:SHOWN]) + more
