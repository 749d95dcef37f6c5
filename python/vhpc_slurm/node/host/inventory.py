# SPDX-License-Identifier: Apache-2.0
"""A compute node as its kernel describes it: sysfs and procfs -> ``HostInventory``.

Only reads, and only below the given roots, so that captured trees of other
machines can be read like this one.
"""

from __future__ import annotations

import errno
import os
import platform
import re
from pathlib import Path

from vhpc_slurm.architecture import X86_64, of_machine
from vhpc_slurm.config import Config
from vhpc_slurm.errors import NodeError
from vhpc_slurm.model import HostInventory
from vhpc_slurm.node.host import cells, pci, sysfs, topology

PROC = Path("/proc")
KVM_DEVICE = Path("/dev/kvm")
KVM_HINT = "load kvm_intel or kvm_amd (x86), and enable virtualization in the firmware"


def read_inventory(
    node: str,
    config: Config,
    *,
    proc_root: Path = PROC,
    kvm_device: Path = KVM_DEVICE,
) -> HostInventory:
    """Describe this node.

    Args:
        node: Slurm's name of the node.
        config: ``host.sysfs_root`` names the tree to read; ``guests.accelerator`` decides about KVM.
        proc_root: path of procfs; the first CPU of ``cpuinfo``, the ``numa_status`` of GPUs' drivers
            and, with at most one NUMA cell, ``meminfo`` are read.
        kvm_device: the device file that QEMU would open.

    Raises:
        NodeError: the tree lacks files that every Linux has, or is unreadable.
    """
    root = config.host.sysfs_root
    try:
        cpuinfo = sysfs.text(str(proc_root / "cpuinfo")) or ""
        online, offline = topology.cpu_numbers(root)
        cell_cpus = cells.cell_cpus(root, online)
        slurm_cpus = online & (topology.performance_cores(root) or online)
        found = topology.read_topology(root, cell_cpus, online, offline)
        host_cells = cells.read_cells(root, str(proc_root), cell_cpus)
        functions, remarks = pci.read_functions(root, cell_cpus, online)
    except (OSError, ValueError) as err:
        raise NodeError(f"cannot read the topology of {node} below {root}", str(err)) from err
    if not found.online:
        raise NodeError(f"{root} lists no online CPU", "", "check host.sysfs_root")
    kvm, reason = decide_kvm(config.guests.accelerator, cpuinfo, kvm_device, platform.machine())
    bits = re.search(r"^address sizes\s*:\s*([0-9]{1,2}) bits physical", cpuinfo, re.MULTILINE)
    return HostInventory(
        node=node,
        cpu_vendor=_vendor(cpuinfo),
        cpus=tuple(sorted([*found.online, *found.offline])),
        cells=host_cells,
        abstract=tuple(cpu.os_cpu for cpu in found.online if slurm_cpus >> cpu.os_cpu & 1),
        kvm=kvm,
        kvm_reason=reason,
        arch=platform.machine(),
        caches=found.caches,
        pci=functions,
        address_bits=int(bits[1]) if bits else 0,
        invariant_tsc="nonstop_tsc" in _cpuinfo_field(cpuinfo, "flags").split(),
        remarks=remarks,
    )


def decide_kvm(
    accelerator: str, cpuinfo: str, kvm_device: Path = KVM_DEVICE, arch: str = X86_64.name
) -> tuple[bool, str]:
    """Whether guests use KVM here, and the reason in one clause.

    That the device opens proves little on x86: software modules provide ``/dev/kvm`` on
    CPUs without virtualization, and distribution kernels do not boot there.
    So the CPU must show svm or vmx as well, unless the site requires KVM. An Arm kernel
    has the device only if it was started in EL2 (Documentation/arch/arm64/booting.rst).

    Args:
        accelerator: the site's setting: ``auto``, ``kvm`` or ``tcg``.
        cpuinfo: text of /proc/cpuinfo.
        kvm_device: the device file that QEMU would open.
        arch: of this machine.

    Raises:
        NodeError: the site requires KVM and the device does not open.
    """
    if accelerator == "tcg":
        return False, "guests.accelerator = tcg"
    problem = open_problem(kvm_device)
    if accelerator == "kvm":
        if problem:
            raise NodeError(
                "guests.accelerator = kvm, but KVM is not usable",
                problem,
                f"{KVM_HINT}, or set accelerator = auto",
            )
        return True, "guests.accelerator = kvm"
    if problem:
        return False, problem
    needed = of_machine(arch).kvm_flags
    if not needed:
        return True, f"{kvm_device} opens"
    flags = set(_cpuinfo_field(cpuinfo, "flags").split())
    for flag in needed:
        if flag in flags:
            return True, f"{kvm_device} opens and the CPU has {flag}"
    return False, f"{kvm_device} opens, but the CPU shows neither svm nor vmx"


def open_problem(device: Path) -> str:
    """The reason if ``device`` does not open read-write, else empty."""
    try:
        os.close(os.open(device, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))
    except OSError as err:
        if err.errno == errno.ENOENT:
            return f"there is no {device}"
        return f"{device} does not open: {err.strerror}"
    return ""


def _cpuinfo_field(cpuinfo: str, key: str) -> str:
    match = re.search(rf"^{re.escape(key)}\s*:\s*(.*)$", cpuinfo, re.MULTILINE)
    return match[1].strip() if match else ""


def _vendor(cpuinfo: str) -> str:
    """The vendor of the first CPU; on Arm the number of its implementer, such as 0x41."""
    return _cpuinfo_field(cpuinfo, "vendor_id") or _cpuinfo_field(cpuinfo, "CPU implementer")


def cpu_model(proc_root: Path = Path("/proc")) -> str:
    """The name of the first CPU; on Arm its part and variant; empty if the kernel reports none."""
    cpuinfo = sysfs.text(str(proc_root / "cpuinfo")) or ""
    numbers = (_cpuinfo_field(cpuinfo, key) for key in ("CPU part", "CPU variant", "CPU revision"))
    return _cpuinfo_field(cpuinfo, "model name") or " ".join(filter(None, numbers))
