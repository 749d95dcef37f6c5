# SPDX-License-Identifier: Apache-2.0
"""The architectures of the hardware lab's machine: the only place that says in what they differ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vmimages.kernel import vmlinux

from vhpc_slurm.architecture import AARCH64, X86_64, Architecture
from vhpc_slurm.bootfiles import armkernel
from vlablib.recipe import DEFAULT_SUITE, HARDWARE, HARDWARE_ARM, SELINUX, SUITES, Suite
from vlablib.report import LabError
from vlablib.settings import CHECKOUT


@dataclass(frozen=True)
class Arch:
    """One architecture.

    Attributes:
        guest: that of its processor, of its image, and of its guests.
        suite: its system.
        tools: the tree with programs of this host: QEMU and Python. None: the machine's own tree.
        machine, cpu: QEMU's options -M and -cpu.
        devices: what must be before all other devices.
        firmware: file of its tree; empty for QEMU's own.
        kernel: from the file in /boot to the one that QEMU starts.
        cmdline: the kernel's parameters.
        module: the kernel's module of KVM, if it is one.
        toolchain: file of CMake for its programs, None for this host's.
        slowness: how many times longer everything in it takes than in the machine of x86-64.
    """

    guest: Architecture
    suite: Suite
    tools: Suite | None
    machine: str
    cpu: str
    devices: tuple[str, ...]
    firmware: str
    kernel: Callable[[bytes], bytes]
    cmdline: str
    module: str
    toolchain: Path | None
    slowness: int

    @property
    def name(self) -> str:
        """Debian's name of it."""
        return self.guest.debian

    def with_selinux(self) -> Suite:
        """Its system with SELinux.

        Raises:
            LabError: the machine of this architecture has no SELinux.
        """
        if self.guest is not X86_64:
            raise LabError(f"hwlab has no machine of {self.name} with SELinux; leave out --selinux or --arch")
        return SELINUX


_AMD64 = Arch(
    guest=X86_64,
    suite=HARDWARE,
    tools=None,
    machine="q35,accel=tcg,kernel-irqchip=split",
    cpu="max",
    devices=("intel-iommu,intremap=on,caching-mode=on,device-iotlb=on,aw-bits=48",),
    firmware="",
    kernel=vmlinux,
    cmdline="intel_iommu=on iommu=pt tsc=unstable no_timer_check",
    module="kvm_amd",
    toolchain=None,
    slowness=1,
)
_ARM64 = Arch(
    guest=AARCH64,
    suite=HARDWARE_ARM,
    tools=SUITES[DEFAULT_SUITE],
    machine="virt,accel=tcg,virtualization=on,gic-version=3,its=on,iommu=smmuv3",
    # it has EL2 with VHE; the pointer authentication of "max" would take most of the emulator's time
    cpu="neoverse-n1",
    devices=(),
    # ACPI describes the root complexes of both cells, a device tree only the first one
    firmware="usr/share/qemu-efi-aarch64/QEMU_EFI.fd",
    kernel=armkernel.image,
    cmdline="iommu.passthrough=1",
    module="",
    toolchain=CHECKOUT / "cmake/aarch64.cmake",
    slowness=3,
)
ARCHS = {arch.name: arch for arch in (_AMD64, _ARM64)}
DEFAULT = _AMD64.name
