# SPDX-License-Identifier: Apache-2.0
"""The hardware lab's machine: emulated, with an IOMMU, two NUMA nodes, and devices for guests."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from vlablib import rootfs
from vlablib.hwarch import ARCHS, Arch
from vlablib.hwfiles import archive, program_of
from vlablib.report import LabError, step
from vlablib.settings import Lab, deadline

MEMORY_MIB = 3072
_NICENESS = -15
# On a slow machine udev needs minutes to find the disks, and the usual limits end the boot in emergency mode.
# The limit of `hwlab up` follows from the machine's speed.
_CMDLINE = (
    "root=/dev/vda rw quiet panic=-1 cryptomgr.notests mitigations=off systemd.show_status=0"
    " udev.event_timeout=3600 systemd.default_device_timeout_sec=infinity"
)
_SELINUX = "security=selinux"
# Their order and ports determine the PCI addresses in lab/hardware/ and tests/hw/.
_DEVICES = (
    "pxb-pcie,id=cell0,bus_nr=32,numa_node=0,bus=pcie.0",
    "pxb-pcie,id=cell1,bus_nr=64,numa_node=1,bus=pcie.0",
    "pcie-root-port,id=nic0_port,bus=cell0,chassis=1,slot=1",
    "pcie-root-port,id=nic1_port,bus=cell1,addr=0,chassis=2,slot=2",
    "pcie-root-port,id=gpu_port,bus=cell1,addr=1,chassis=3,slot=3,pref64-reserve=1G",
    "pcie-root-port,id=old_port,bus=cell0,addr=1,chassis=4,slot=4",
    "igb,id=nic0,netdev=net0,bus=nic0_port,mac=52:54:00:77:00:01",
    "igb,id=nic1,netdev=net1,bus=nic1_port,mac=52:54:00:77:00:02",
    "pci-testdev,id=gpu0,bus=gpu_port,membar=256M",
    # two functions in one IOMMU group, one of them without any reset
    "pcie-pci-bridge,id=old,bus=old_port",
    "pci-testdev,id=gpu1,bus=old,addr=1,membar=1M",
    "e1000,id=old1,bus=old,addr=2,netdev=net2",
)


@dataclass(frozen=True)
class Machine:
    """Paths of the machine's files."""

    lab: Lab
    state: Path
    data: Path

    @classmethod
    def of(cls, lab: Lab) -> Machine:
        """The machine's paths next to those of the ordinary lab with the same name."""
        return cls(
            lab, lab.state.with_name(lab.state.name + "-hw"), lab.data.with_name(lab.data.name + "-hw")
        )

    @property
    def port(self) -> Path:
        """Socket of the machine's agent."""
        return self.state / "agent.sock"

    @property
    def monitor(self) -> Path:
        """Socket of QEMU's monitor."""
        return self.state / "qmp.sock"

    @property
    def console(self) -> Path:
        """Output of the machine's serial port."""
        return self.state / "console.log"

    @property
    def catalog(self) -> Path:
        """Image catalogue that is copied into the machine when it starts."""
        return self.data / "catalog"

    def pid(self) -> int | None:
        """Pid of the running QEMU, None if it does not run."""
        try:
            pid = int((self.state / "qemu.pid").read_text(encoding="ascii"))
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except (OSError, ValueError):
            return None
        return pid if str(self.port).encode() in b"\0".join(words) else None


def start(machine: Machine, arch: Arch, *, selinux: bool = False) -> None:
    """Start the machine with this checkout installed; return while it still boots.

    With ``selinux``, Debian's policy and vhpc's module are enforced before services start.

    Raises:
        LabError: its disk or its files cannot be created.
    """
    if machine.pid() is not None:
        raise LabError("the machine already runs; run: hwlab down")
    root, fd = rootfs.acquire(machine.lab.cache, arch.with_selinux() if selinux else arch.suite)
    tools, tools_fd = rootfs.acquire(machine.lab.cache, arch.tools) if arch.tools else (root, fd)
    held = {fd, tools_fd}
    shutil.rmtree(machine.state, ignore_errors=True)
    machine.state.mkdir(mode=0o700, parents=True)
    (machine.state / "tree").write_text(str(root), encoding="utf-8")
    (machine.state / "arch").write_text(arch.name, encoding="utf-8")
    kernel, initrd, images = (machine.state / name for name in ("vmlinux", "initrd", "catalog.img"))
    with step("preparing the machine"):
        kernel.write_bytes(arch.kernel(_one(root, "boot/vmlinuz-*").read_bytes()))
        leads_to_disk = _one(root, "boot/initrd.img-*").read_bytes()
        # the kernel expects the next archive at a multiple of four
        initrd.write_bytes(leads_to_disk + bytes(-len(leads_to_disk) % 4) + archive(root, arch, tools))
        _make_catalog_disk(machine, images)
    words = f"{_CMDLINE} console={arch.guest.console} {arch.cmdline}"
    command = [*_emulator(tools, arch), *_options(machine, arch, rootfs.disk(root), images)]
    if arch.firmware:
        command += ["-bios", str(root / arch.firmware)]
    command += ["-kernel", str(kernel), "-initrd", str(initrd)]
    command += ["-append", f"{words} {_SELINUX}" if selinux else words]
    # before other work: Slurm in the machine has limits in real time
    command = ["nice", "-n", str(_NICENESS), *command]
    with (machine.state / "qemu.log").open("wb") as log:
        # the open descriptors prevent the removal of the trees and the disk
        qemu = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, pass_fds=held
        )
    with suppress(OSError):  # with autogroups the kernel compares sessions, not processes
        Path(f"/proc/{qemu.pid}/autogroup").write_text(str(_NICENESS), encoding="ascii")
    for one in held:
        os.close(one)
    for _ in deadline(20):
        if machine.pid() is not None and machine.port.exists():
            return
    said = (machine.state / "qemu.log").read_text(encoding="utf-8", errors="replace")
    raise LabError(f"QEMU did not start:\n{said}")


def tree(machine: Machine) -> Path:
    """System tree from which the running machine's disk was made."""
    return Path((machine.state / "tree").read_text(encoding="utf-8"))


def running_arch(machine: Machine) -> Arch:
    """Architecture of the running machine."""
    return ARCHS[(machine.state / "arch").read_text(encoding="utf-8")]


def stop(machine: Machine) -> None:
    """End the machine like a power cut, and remove all of its files except the cached disk."""
    pid = machine.pid()
    if pid is not None:
        os.kill(pid, signal.SIGKILL)
        for _ in deadline(20):
            if machine.pid() is None:
                break
    for folder in (machine.state, machine.data):
        shutil.rmtree(folder, ignore_errors=True)


def _emulator(tools: Path, arch: Arch) -> list[str]:
    """QEMU of a tree: this machine's may be too old for an SR-IOV adapter."""
    command = program_of(tools, arch.guest.qemu)
    for folder in ("qemu", "seabios"):
        command += ["-L", str(tools / "usr/share" / folder)]
    return command


def _options(machine: Machine, arch: Arch, root: Path, images: Path) -> list[str]:
    half = MEMORY_MIB // 2
    options = ["-M", arch.machine, "-cpu", arch.cpu, "-m", str(MEMORY_MIB)]
    options += ["-smp", "2,sockets=2,cores=1,threads=1", "-nodefaults", "-display", "none", "-no-reboot"]
    for cell in range(2):
        options += ["-object", f"memory-backend-ram,id=ram{cell},size={half}M"]
        options += ["-numa", f"node,nodeid={cell},cpus={cell},memdev=ram{cell}"]
    options += ["-numa", "dist,src=0,dst=1,val=20"]
    for number in range(3):
        options += ["-netdev", f"user,id=net{number},restrict=on"]
    for device in (*arch.devices, *_DEVICES):
        options += ["-device", device]
    options += ["-drive", f"file={root},if=none,id=root,format=raw,snapshot=on"]
    options += ["-device", "virtio-blk-pci,bus=pcie.0,drive=root"]
    options += ["-drive", f"file={images},if=none,id=images,format=raw,readonly=on"]
    options += ["-device", "virtio-blk-pci,bus=pcie.0,drive=images"]
    options += ["-chardev", f"file,id=console,path={machine.console}", "-serial", "chardev:console"]
    options += ["-chardev", f"socket,id=agent,path={machine.port},server=on,wait=off"]
    options += [
        "-device",
        "virtio-serial-pci,bus=pcie.0",
        "-device",
        "virtserialport,chardev=agent,name=vlab",
    ]
    options += ["-qmp", f"unix:{machine.monitor},server=on,wait=off"]
    return [*options, "-pidfile", str(machine.state / "qemu.pid")]


def _make_catalog_disk(machine: Machine, target: Path) -> None:
    machine.catalog.mkdir(parents=True, exist_ok=True)
    command = ["mke2fs", "-q", "-t", "ext4", "-L", "images", "-d", str(machine.catalog), str(target), "1G"]
    rootfs.run(*command)


def _one(tree: Path, pattern: str) -> Path:
    found = sorted(tree.glob(pattern))
    if len(found) != 1:
        raise LabError(f"{tree} has {len(found)} files {pattern}; remove the tree")
    return found[0]
