# SPDX-License-Identifier: Apache-2.0
"""The processor architectures of guests: the only place that says in what they differ.

Standard library only: the sandbox of imports has this module too.

Sources: QEMU's docs/system/arm/virt.rst and hw/i386/pc_q35.c, https://libvirt.org/formatdomain.html,
the ELF specification's e_machine, Linux Documentation/arch/x86/boot.rst and Documentation/arch/arm64,
the OCI image specification (platform of an index), NCCL's src/graph/xml.cc (2.28).
"""

from __future__ import annotations

import platform
from dataclasses import dataclass

KERNEL_TYPE = "application/vnd.vhpc.kernel."
"""Prefix of the media types of kernels; a format follows."""

RHEL_QEMU = "/usr/libexec/qemu-kvm"


@dataclass(frozen=True)
class Architecture:
    """One architecture.

    Attributes:
        name: as ``uname -m`` and libvirt have it; manifests too.
        debian, oci, nccl: its names in Debian, in OCI indexes, and in NCCL's topology files.
        oci_baseline: variant of an OCI platform that runs on all its processors.
        elf_machine: e_machine of its programs.
        kernels: formats of kernels that QEMU starts there.
        qemu: program; ``qemu_package`` is Debian's package with it.
        machine: QEMU's machine type.
        console: the guest's name of the first serial port.
        is_pc: the machine has the devices of a PC: APICs, ISA, timers, CPU features with names.
        panic: libvirt's model of the device that reports a kernel panic.
        libvirt_oldest: version that guests need: major * 1,000,000 + minor * 1,000 + release.
        pci_hole_gib: 64-bit window for BARs without a setting. ``pci_hole_fixed``: there is no setting.
        firmware: files of a UEFI for guests with devices of the host, whose expander buses only ACPI tables
            describe, and the machine has those only with UEFI. Empty: the firmware of QEMU does.
        kvm_flags: of /proc/cpuinfo; without one of them /dev/kvm cannot be the processor's. Empty: the
            kernel makes that file only where the processor can.
    """

    name: str
    debian: str
    oci: str
    oci_baseline: str
    nccl: str
    elf_machine: int
    kernels: tuple[str, ...]
    qemu: str
    qemu_package: str
    machine: str
    console: str
    is_pc: bool
    panic: str
    libvirt_oldest: int
    pci_hole_gib: int
    pci_hole_fixed: bool = False
    firmware: tuple[str, ...] = ()
    kvm_flags: tuple[str, ...] = ()

    @property
    def programs(self) -> tuple[str, ...]:
        """QEMU's program; on a host of this architecture also RHEL's."""
        return (self.qemu, RHEL_QEMU) if self.name == platform.machine() else (self.qemu,)

    @property
    def oci_platform(self) -> tuple[str, str]:
        """Architecture and system of an OCI image."""
        return self.oci, "linux"


X86_64 = Architecture(
    name="x86_64",
    debian="amd64",
    oci="amd64",
    oci_baseline="v1",
    nccl="x86_64",
    elf_machine=62,
    kernels=("bzimage", "elf"),
    qemu="qemu-system-x86_64",
    qemu_package="qemu-system-x86",
    machine="q35",
    console="ttyS0",
    is_pc=True,
    panic="isa",
    libvirt_oldest=9_000_000,
    pci_hole_gib=32,
    kvm_flags=("vmx", "svm"),
)
AARCH64 = Architecture(
    name="aarch64",
    debian="arm64",
    oci="arm64",
    oci_baseline="v8",
    nccl="arm64",
    elf_machine=183,
    kernels=("image",),
    qemu="qemu-system-aarch64",
    qemu_package="qemu-system-arm",
    machine="virt",
    console="ttyAMA0",
    is_pc=False,
    panic="pvpanic",
    libvirt_oldest=9_001_000,
    pci_hole_gib=512,
    pci_hole_fixed=True,
    # of Debian, of the RHEL family, of SUSE
    firmware=(
        "/usr/share/AAVMF/AAVMF_CODE.no-secboot.fd",
        "/usr/share/AAVMF/AAVMF_CODE.fd",
        "/usr/share/edk2/aarch64/QEMU_EFI-silent-pflash.raw",
        "/usr/share/qemu/aavmf-aarch64-code.bin",
    ),
)
ARCHITECTURES = {one.name: one for one in (X86_64, AARCH64)}


def named(name: str) -> Architecture:
    """The architecture of a name; ValueError if guests cannot have it."""
    found = ARCHITECTURES.get(name)
    if found is None:
        raise ValueError(f"guests run on {' and '.join(ARCHITECTURES)}, not on {name!r}")
    return found


def own() -> Architecture:
    """That of this machine; ValueError as ``named``."""
    return named(platform.machine())


def of_machine(machine: str) -> Architecture:
    """The architecture of a host or an image, by ``uname -m``; an unknown machine counts as x86_64.

    So ``vhpc inventory``, ``vhpc plan`` and ``vhpc doctor`` describe every host. An unknown machine gets no
    guest: vhpcd and ``DomainSpec`` refuse its architecture by name, ``vhpc doctor`` reports it.
    """
    return ARCHITECTURES.get(machine, X86_64)
