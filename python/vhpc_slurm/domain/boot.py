# SPDX-License-Identifier: Apache-2.0
"""Direct kernel boot with kernel and initrd from the image: no boot loader, no firmware setup.

A UEFI, where a guest needs one, gets all three from QEMU and starts the kernel at once. It has no file for
its variables: they are gone with the guest.
"""

from __future__ import annotations

from vhpc_slurm.architecture import X86_64
from vhpc_slurm.domain import iommu
from vhpc_slurm.domain.spec import DomainSpec
from vhpc_slurm.record import Record

ROOT_DEVICE = "/dev/vda"
DISK_DEVICE = "/dev/vdb"
TRANSLATION = "intel_iommu="


class BootContext(Record, frozen=True):
    """Values of the boot template; without a kernel the firmware has nothing to boot.

    An empty ``firmware`` is QEMU's choice.
    """

    arch: str
    machine: str
    firmware: str
    kernel: str
    initrd: str
    cmdline: str


def kernel_cmdline(
    image_cmdline: str,
    root_format: str,
    *,
    console: str = X86_64.console,
    remapping: bool = False,
    disk: bool = False,
    mounted: bool = False,
) -> str:
    """The image's kernel parameters, then those that every guest needs and the image lacks.

    ``panic=-1`` reboots at once, which ends a guest; ``quiet`` because each
    byte on an emulated serial port costs an exit.  With an IOMMU for interrupt
    remapping, ``intel_iommu=off`` prevents DMA translation by the kernel,
    unless the image sets this parameter.  With a disk, changes to the root go to it, unless it is
    one that the agent mounts.
    """
    words = image_cmdline.split()
    needed = [
        f"console={console}",
        "panic=-1",
        "quiet",
        f"vhpc.root={ROOT_DEVICE}",
        f"vhpc.rootfstype={root_format}",
    ]
    if disk:
        needed.append(f"{'vhpc.agent.disk' if mounted else 'vhpc.disk'}={DISK_DEVICE}")
    if remapping and not any(word.startswith(TRANSLATION) for word in words):
        needed.append(f"{TRANSLATION}off")
    return " ".join([*words, *(word for word in needed if word not in words)])


def context(spec: DomainSpec) -> BootContext:
    """Kernel, initrd, command line."""
    guest, paths, arch = spec.guest, spec.guest.paths, spec.architecture
    cmdline = kernel_cmdline(
        spec.manifest.cmdline,
        spec.manifest.root_format,
        console=arch.console,
        remapping=iommu.needed(guest.topology, arch),
        disk=bool(paths.disk),
        mounted=bool(guest.disk_mount),
    )
    return BootContext(arch.name, arch.machine, spec.firmware, paths.kernel, paths.initrd, cmdline)
