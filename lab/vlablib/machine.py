# SPDX-License-Identifier: Apache-2.0
"""Turns a forked process into a lab host: its root, devices, and PID 1.

This code runs in the child, in the namespaces of the new host.  Every mount is
made in the host's own mount namespace, so that the kernel removes all of them
with the host's last process.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import stat
import sys
from dataclasses import dataclass
from pathlib import Path

from vlablib import cgroups, kernel
from vlablib.running import INIT
from vlablib.settings import SLURMCTLD_STATE, Lab

_INIT_IN_HOST = "/usr/local/sbin/vlab-init"
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty", "fuse")
_KVM_DEVICES = ("kvm", "vhost-net", "vhost-vsock")


@dataclass(frozen=True)
class Machine:
    """One host of a lab."""

    lab: Lab
    name: str
    tree: Path


def become_lab_init(lab: Lab) -> None:
    """Turn this process, first of its pid namespace, into the lab's PID 1; does not return."""
    kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_SLAVE)
    _become(sys.executable, str(INIT), "lab", "lab", str(lab.state))


def become_host(machine: Machine) -> None:
    """Turn this process, first of its namespaces, into a host's PID 1; does not return."""
    # slave, not private: file systems that the machine unmounts must not stay busy here
    kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_SLAVE)
    root = _mount_system(machine)
    _mount_kernel_views(root, with_cgroups=cgroups.usable(machine.lab))
    _make_devices(root / "dev")
    _mount_shared(machine, root)
    init = root / _INIT_IN_HOST.lstrip("/")
    shutil.copyfile(INIT, init)
    init.chmod(0o755)
    socket.sethostname(machine.name)
    kernel.enter_root(str(root))
    _become("/usr/bin/python3", _INIT_IN_HOST, "host", machine.name, str(machine.lab.state))


def real_kvm() -> bool:
    """Whether /dev/kvm works with the CPU: on some machines it exists, but no guest boots."""
    try:
        os.close(os.open("/dev/kvm", os.O_RDWR | os.O_CLOEXEC))
    except OSError:
        return False
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    return "svm" in flags or "vmx" in flags


def _mount_system(machine: Machine) -> Path:
    disk = machine.lab.host_disk(machine.name)
    for folder in ("upper", "work", "root"):
        (disk / folder).mkdir(parents=True, exist_ok=True)
    # a volatile overlay leaves this mark if it was not unmounted cleanly, and then refuses to mount;
    # it has lost at most what a crash of the whole machine loses
    shutil.rmtree(disk / "work/work/incompat", ignore_errors=True)
    root = disk / "root"
    options = f"lowerdir={machine.tree},upperdir={disk}/upper,workdir={disk}/work,volatile"
    try:
        kernel.mount("overlay", str(root), "overlay", 0, options)
    except OSError as err:
        hint = "is VLAB_DATA (default /var/tmp) on a disk that can hold an overlay's upper folder?"
        raise OSError(err.errno, f"{err.strerror}; {hint}") from err
    return root


def _mount_kernel_views(root: Path, *, with_cgroups: bool) -> None:
    no_programs = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
    kernel.mount("proc", f"{root}/proc", "proc", no_programs)
    # read-only: the lab must not change the real machine's devices and limits
    kernel.mount("sysfs", f"{root}/sys", "sysfs", no_programs | kernel.MS_RDONLY)
    kernel.mount("tmpfs", f"{root}/run", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755")
    if with_cgroups:
        cgroups.mount_inside(root)
    (root / "run/lock").mkdir(mode=0o1777)
    (root / "run/lock").chmod(0o1777)


def _make_devices(dev: Path) -> None:
    kernel.mount("tmpfs", str(dev), "tmpfs", kernel.MS_NOSUID | kernel.MS_NOEXEC, "mode=755")
    for name in _DEVICES:
        _copy_node(Path("/dev") / name, dev / name, 0o666)
    if real_kvm():
        for name in _KVM_DEVICES:
            _copy_node(Path("/dev") / name, dev / name, 0o660)
    if Path("/dev/net/tun").exists():
        (dev / "net").mkdir()
        _copy_node(Path("/dev/net/tun"), dev / "net/tun", 0o666)
    (dev / "pts").mkdir()
    kernel.mount("devpts", f"{dev}/pts", "devpts", 0, "newinstance,ptmxmode=0666,mode=620,gid=5")
    (dev / "shm").mkdir()
    kernel.mount("tmpfs", f"{dev}/shm", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=1777")
    for link, target in (
        ("ptmx", "pts/ptmx"),
        ("fd", "/proc/self/fd"),
        ("stdin", "/proc/self/fd/0"),
        ("stdout", "/proc/self/fd/1"),
        ("stderr", "/proc/self/fd/2"),
    ):
        (dev / link).symlink_to(target)


def _copy_node(source: Path, target: Path, mode: int) -> None:
    try:
        info = source.stat()
    except FileNotFoundError:
        return
    os.mknod(target, stat.S_IFCHR | mode, info.st_rdev)
    target.chmod(mode)
    if target.name == "kvm":
        groups = (target.parent.parent / "etc/group").read_text(encoding="utf-8").splitlines()
        os.chown(target, 0, next(int(line.split(":")[2]) for line in groups if line.startswith("kvm:")))


def _mount_shared(machine: Machine, root: Path) -> None:
    lab = machine.lab
    kernel.bind(str(lab.home), f"{root}/home")
    kernel.bind(str(lab.scratch), f"{root}/scratch")
    kernel.bind(str(lab.shared), f"{root}/shared", read_only=machine.name != "ctl")
    if machine.name in ("ctl", "ctl2") and lab.slurmctld.exists():
        state = root / SLURMCTLD_STATE.lstrip("/")
        state.mkdir(parents=True, exist_ok=True)
        kernel.bind(str(lab.slurmctld), str(state))
    # hosts that get vhpc from packages have no such folder
    for packages in root.glob("opt/vhpc/lib/python3.*/site-packages/vhpc_slurm"):
        kernel.bind(str(lab.deployed / "libexec"), f"{root}/usr/libexec/vhpc")
        kernel.bind(str(lab.deployed / "python"), str(packages))


def _become(*command: str) -> None:
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    # flock(1), for one, hands its lock to its command: a lab must not hold it for as long as it is up
    for path in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(OSError):  # that of the list itself
            os.set_inheritable(int(path.name), path.name in ("0", "1", "2"))
    os.umask(0o022)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
    os.execve(command[0], list(command), environment)  # noqa: S606
