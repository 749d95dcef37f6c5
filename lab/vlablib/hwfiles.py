# SPDX-License-Identifier: Apache-2.0
"""Files on the disk of the hardware lab's machine: the installed checkout, and configuration."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from string import Template

from vhpc_slurm.bootfiles.newc import Archive
from vlablib.deploy import collect, package
from vlablib.hwarch import Arch
from vlablib.report import LabError
from vlablib.settings import CHECKOUT, slower

_TEMPLATES = CHECKOUT / "lab/hardware"
_LIBEXEC = "usr/libexec/vhpc"
# seconds on the reference machine, by their names in the templates
_LIMITS = {"boot": 300, "stage": 120, "hooks": 600, "start": 900}
# path on the machine, and mode
_CONFIGURATION = {
    "gres.conf": ("etc/slurm/gres.conf", 0o644),
    "cgroup.conf": ("etc/slurm/cgroup.conf", 0o644),
    "gpu.map": ("etc/vhpc/gpu.map", 0o644),
    "tmpfiles.conf": ("etc/tmpfiles.d/vlab.conf", 0o644),
    "fstab": ("etc/fstab", 0o644),
    "vlab-address.service": ("etc/systemd/system/vlab-address.service", 0o644),
    "udev.rules": ("etc/udev/rules.d/90-vlab.rules", 0o644),
    "vhpcd.service": ("etc/systemd/system/vhpcd.service", 0o644),
    "vlab-agent.service": ("etc/systemd/system/vlab-agent.service", 0o644),
    "agent": ("usr/local/sbin/vlab-agent", 0o755),
}
_FILES = {
    "etc/hostname": "hw\n",
    "etc/hosts": "127.0.0.1 localhost\n10.78.0.2 hw\n",
    "etc/machine-id": "5b0b7a1a2c4d4b2b9d3f6a7081920a3b\n",
    # for every service, as on the kernel's command line (hardware.py)
    "etc/systemd/system/service.d/vlab.conf": "[Service]\nTimeoutStartSec=infinity\nWatchdogSec=0\n",
    "etc/slurm/plugstack.conf": "required vhpc.so\n",
    "etc/systemd/system/multi-user.target.d/vlab.conf": (
        "[Unit]\nWants=vlab-address.service vlab-agent.service vhpcd.service\n"
    ),
    # as `systemctl enable vhpc-node-setup.service`
    "etc/systemd/system/slurmd.service.d/vlab.conf": "[Unit]\nWants=vhpc-node-setup.service\n",
    # as `vhpc setup node` closes them to users
    "etc/systemd/system/libvirtd.socket.d/vhpc.conf": "[Socket]\nSocketMode=0600\n",
    "etc/systemd/system/libvirtd-ro.socket.d/vhpc.conf": "[Socket]\nSocketMode=0600\n",
}


def _packages(tree: Path) -> Path:
    return next(tree.glob("opt/vhpc/lib/python3.*/site-packages")).relative_to(tree)


def installed(tree: Path, arch: Arch) -> Iterator[tuple[str, bytes, int]]:
    """Installed files of the checkout: path on the machine, content, mode.

    Raises:
        LabError: a part of the checkout cannot be built.
    """
    programs, failures = collect(tree, toolchain=arch.toolchain)
    if failures:
        raise LabError("\n".join(failures))
    packages = _packages(tree)
    for name, path in programs.items():
        yield f"{_LIBEXEC}/{name}", path.read_bytes(), 0o755
    for name, path in package().items():
        yield f"{packages}/vhpc_slurm/{name}", path.read_bytes(), 0o644


def program_of(tree: Path, name: str) -> list[str]:
    """Command to run a tree's program on this machine, with the tree's own loader and libraries."""
    libraries = tree / "usr/lib/x86_64-linux-gnu"
    return [
        str(tree / "usr/lib64/ld-linux-x86-64.so.2"),
        "--library-path",
        str(libraries),
        str(tree / "usr/bin" / name),
    ]


def _bytecode(tools: Path) -> Iterator[tuple[str, bytes]]:
    """Bytecode of the package by relative path; the emulated machine would need half a minute for it.

    Python of the same version writes the same on all architectures.
    """
    compile_all = ["-m", "compileall", "-q", "--invalidation-mode", "checked-hash", "."]
    with tempfile.TemporaryDirectory() as folder:
        for name, path in package().items():
            target = Path(folder, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
        environment = {"PYTHONHOME": str(tools / "usr"), "PATH": os.environ["PATH"]}
        subprocess.run([*program_of(tools, "python3"), *compile_all], cwd=folder, env=environment, check=True)
        for compiled in Path(folder).rglob("*.pyc"):
            yield str(compiled.relative_to(folder)), compiled.read_bytes()


def archive(tree: Path, arch: Arch, tools: Path) -> bytes:
    """An initramfs archive whose folder /vlab is copied over the machine's root; errors as ``installed``.

    Args:
        tree: system tree of the machine.
        arch: of the machine.
        tools: system tree with programs of this host.
    """
    out = Archive()
    for name, data, mode in installed(tree, arch):
        out.file(f"vlab/{name}", data, mode)
    packages = _packages(tree)
    for name, data in _bytecode(tools):
        out.file(f"vlab/{packages}/vhpc_slurm/{name}", data)
    for name, (target, mode) in _CONFIGURATION.items():
        out.file(f"vlab/{target}", (_TEMPLATES / name).read_bytes(), mode)
    for target, text in _FILES.items():
        out.file(f"vlab/{target}", text.encode())
    # udev loads KVM late, on a slow machine after the first guest has started
    out.file("vlab/etc/modules-load.d/vlab.conf", f"{arch.module}\nvfio-pci\n".encode())
    limits = {name: slower(seconds, arch.slowness) for name, seconds in _LIMITS.items()}
    for target in ("etc/vhpc/vhpc.toml", "etc/slurm/slurm.conf"):
        template = (_TEMPLATES / f"{Path(target).name}.in").read_text(encoding="utf-8")
        out.file(f"vlab/{target}", Template(template).substitute(limits).encode())
    unit = (CHECKOUT / "systemd/vhpc-node-setup.service.in").read_text(encoding="utf-8")
    unit = unit.replace("@VHPC_COMMAND@", "/usr/bin/vhpc")
    out.file("vlab/etc/systemd/system/vhpc-node-setup.service", unit.encode())
    out.file("vlab/etc/munge/munge.key", os.urandom(64), 0o400)
    return out.to_bytes()
