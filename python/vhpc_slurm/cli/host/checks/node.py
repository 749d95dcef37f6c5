# SPDX-License-Identifier: Apache-2.0
"""A compute node: everything that Prolog, QEMU and the share daemons need."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from vhpc_slurm import __version__
from vhpc_slurm.architecture import named, of_machine
from vhpc_slurm.cli.host.checks import CheckResult, confinement, error, labels, ok, vhost, warn
from vhpc_slurm.config import Config
from vhpc_slurm.domain import iommu
from vhpc_slurm.domain.spec import format_version
from vhpc_slurm.errors import VhpcError
from vhpc_slurm.model import HostInventory
from vhpc_slurm.node.guest import libvirtd, refusal
from vhpc_slurm.node.host import accounts, inventory
from vhpc_slurm.node.store import outbox
from vhpc_slurm.node.store.layout import Layout

TIMEOUT_S = 15
PROGRAMS = ("/usr/bin/setpriv", "/usr/bin/find")
LIBVIRT_FOLDER = Path("/var/lib/libvirt/qemu")
MIN_RUN_MIB = 16
"""Less than this in the run folder is reported: kernels and initrds of images alone may need as much."""
_VERSION = re.compile(r"\b(\d+\.\d+(?:\.\d+)?)\b")
_OCTAL = re.compile(r"\\([0-7]{3})")


def check(config: Config, node: str, *, root: bool) -> Iterator[CheckResult]:
    """Results for this compute node; some checks need root."""
    yield from architecture(platform.machine())
    yield from topology(config, node, root=root)
    if root:
        yield from hypervisor(config)
        yield from largest_guest(config, node)
    else:
        yield warn("node.libvirt", "libvirt was not checked", "run vhpc doctor as root")
    yield from libvirt_folder(config, LIBVIRT_FOLDER)
    yield virtiofsd(config.shares.virtiofsd)
    yield programs(PROGRAMS)
    yield from confinement.check(config)
    for name in ("vhpc-shim", "vhpc-run", "vhpc-confine", "vhpc-locks"):
        yield guest_program(Path(config.paths.libexec) / name)
    yield name_service(Path("/etc/nsswitch.conf"))
    mounts = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace")
    yield run_folder(config.paths.run, mounts)
    yield from state_folder(config.paths.state, mounts, root=root)
    if root:
        yield from acknowledgements(config)
    yield apparmor(config, Path("/"))
    yield from labels.check(config)


def name_service(file: Path) -> CheckResult:
    """Warn if only steps can look up users: nss_slurm does not answer a Prolog."""
    name = "node.name_service"
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""  # glibc then uses files
    found = re.search(r"^\s*passwd:([^#\n]*)", text, re.MULTILINE)
    services = [word for word in found[1].split() if not word.startswith("[")] if found else ["files"]
    if "slurm" not in services or set(services) - {"slurm", "files", "compat", "systemd"}:
        return ok(name, f"users are looked up in: {', '.join(services)}")
    return warn(
        name,
        f"{file} has 'passwd: {' '.join(services)}': a Prolog finds only users that are "
        "in the node's files, and jobs of others drain it",
        "add the site's directory, such as sss, behind slurm",
    )


def architecture(machine: str) -> Iterator[CheckResult]:
    """An error if no guest can run on this machine (``uname -m``)."""
    try:
        named(machine)
    except ValueError as err:
        yield error("node.architecture", str(err), "remove this node from partitions with guests")


def topology(config: Config, node: str, *, root: bool) -> Iterator[CheckResult]:
    """CPUs, KVM, vhost-net and huge pages."""
    try:
        host = inventory.read_inventory(node, config)
    except VhpcError as err:
        yield error("node.topology", err.line(), "see vhpc.toml(5)")
        return
    sockets = len({cpu.socket for cpu in host.cpus if cpu.online})
    yield ok("node.topology", f"{len(host.abstract)} CPUs, {sockets} sockets, {len(host.cells)} NUMA cells")
    yield kvm(host)
    yield from vhost.check(config, host, root=root)
    if config.guests.emulated:
        yield emulated(config, host)
    yield hugepages(host)


def kvm(host: HostInventory) -> CheckResult:
    """Whether guests run with KVM."""
    if host.kvm:
        return ok("node.kvm", f"guests run with KVM: {host.kvm_reason}")
    return warn(
        "node.kvm",
        f"NO KVM: guests run in software emulation (TCG), 10 to 100 times slower: {host.kvm_reason}",
        f"{inventory.KVM_HINT}; TCG suffices for tests only",
    )


def emulated(config: Config, host: HostInventory) -> CheckResult:
    """That the site starts images of other architectures: never in production."""
    names = " and ".join(config.guests.emulated)
    return warn(
        "node.emulated",
        f"{host.node} starts images for {names} in software emulation, whatever its processor",
        "remove guests.emulated from vhpc.toml: it is for tests",
    )


def hugepages(host: HostInventory) -> CheckResult:
    """Explicit huge pages, for information: guests do not need them."""
    pools = [
        f"cell {cell.cell}: {free} of {total} free of {size} KiB"
        for cell in host.cells
        for size, total, free in cell.hugepages
        if total
    ]
    return ok("node.hugepages", "; ".join(pools) or "none are reserved; guests use ordinary pages")


def hypervisor(config: Config) -> Iterator[CheckResult]:
    """Whether libvirt and QEMU are installed and new enough."""
    try:
        with libvirtd.connect(config.guests.libvirt_uri, config.guests.stage_timeout_s) as connection:
            libvirt_version, qemu_version = connection.version()
    except ImportError:
        yield error("node.libvirt", "the Python module libvirt is not installed", "install python3-libvirt")
        return
    except VhpcError as err:
        yield error(
            "node.libvirt",
            err.line(),
            f"start libvirt, or correct guests.libvirt_uri ({config.guests.libvirt_uri})",
        )
        return
    text = format_version(libvirt_version)
    oldest = of_machine(platform.machine()).libvirt_oldest
    if libvirt_version < oldest:
        yield error(
            "node.libvirt", f"libvirt {text} is too old", f"install {format_version(oldest)} or newer"
        )
    else:
        yield ok("node.libvirt", f"libvirt {text} at {config.guests.libvirt_uri}")
    yield ok("node.qemu", f"QEMU {format_version(qemu_version)}")


def largest_guest(config: Config, node: str) -> Iterator[CheckResult]:
    """Whether a guest can have all CPUs of a large node; no result on smaller nodes, or when unknown."""
    try:
        host = inventory.read_inventory(node, config)
        if len(host.abstract) <= iommu.ALL_CPUS:
            return
        with libvirtd.connect(config.guests.libvirt_uri, config.guests.stage_timeout_s) as connection:
            most = refusal.most_vcpus(connection, host, config.guests.emulator)
    except VhpcError:
        return  # other checks report the reason
    if len(host.abstract) <= most:
        yield ok("node.vcpus", f"a guest may have {most} vCPUs")
    else:
        yield warn(
            "node.vcpus",
            f"the installed QEMU gives a guest at most {most} vCPUs: jobs with more of the node's "
            f"{len(host.abstract)} CPUs fail",
            "tell users about --vhpc-guests-per-node, or install QEMU 9.0 or newer",
        )


def libvirt_folder(config: Config, path: Path) -> Iterator[CheckResult]:
    """QEMU must read its keys in libvirt's folder, with a uid that is in no group of libvirt.

    Debian installs that folder with mode 0750; then every start fails with
    "Unable to read …/master-key.aes".
    """
    try:
        mode = path.stat()
    except (FileNotFoundError, PermissionError):
        return  # libvirt creates it when it starts, or uses another folder (session connection)
    searchable = mode.st_mode & 0o001
    if mode.st_gid == _group_number(config.guests.qemu_group):
        searchable = mode.st_mode & 0o010
    if searchable:
        yield ok("node.libvirt_folder", f"{path} can be searched by QEMU")
    else:
        yield error(
            "node.libvirt_folder",
            f"{path} has mode {mode.st_mode & 0o7777:04o}: QEMU, which has its own uid, cannot read its keys",
            f"chmod o+x {path}; on Debian for good: dpkg-statoverride --update --add "
            f"libvirt-qemu libvirt-qemu 0751 {path}",
        )


def virtiofsd(path: str) -> CheckResult:
    """Whether virtiofsd is the Rust one: QEMU's old one in C cannot run as an unprivileged user."""
    name = "node.virtiofsd"
    hint = "install virtiofsd (the Rust one) and set shares.virtiofsd in vhpc.toml"
    code, text = _version_of(path)
    if code != 0:
        return error(name, f"{path} cannot be run: {text}", hint)
    if "FUSE kernel interface" in text or "Bellard" in text:
        return error(name, f"{path} is QEMU's old virtiofsd in C", hint)
    return ok(name, f"{path}: {text.splitlines()[0]}")


def programs(paths: tuple[str, ...]) -> CheckResult:
    """Whether the system programs that hooks run are installed."""
    absent = [path for path in paths if not os.access(path, os.X_OK)]
    if absent:
        return error(
            "node.programs", f"not installed: {', '.join(absent)}", "install util-linux and coreutils"
        )
    return ok("node.programs", ", ".join(Path(path).name for path in paths) + " are installed")


def guest_program(path: Path) -> CheckResult:
    """Whether a program of vhpc is installed in the version of this package."""
    name = f"node.{path.name}"
    code, text = _version_of(str(path))
    found = _VERSION.search(text)
    if code != 0 or found is None:
        return error(name, f"{path} does not print its version: {text}", "install vhpc on this node")
    if found[1] != __version__:
        return error(
            name,
            f"{path} has version {found[1]}, this package {__version__}",
            "install the same version of both",
        )
    return ok(name, f"{path} {found[1]}")


def run_folder(path: str, mounts: str) -> CheckResult:
    """Whether the run folder, which must not survive a reboot, is on a tmpfs."""
    kind = filesystem_of(path, mounts)
    if kind in ("tmpfs", "ramfs"):
        free = _free_mib(path)
        if free is not None and free < MIN_RUN_MIB:
            hint = "free some space: jobs with guests are requeued when there is none"
            return warn("node.run", f"{path} has {free} MiB left", hint)
        return ok("node.run", f"{path} is on {kind}")
    return warn(
        "node.run",
        f"{path} is on {kind}: it would still list jobs that a reboot ended",
        "put it on a tmpfs, or empty it at boot with systemd-tmpfiles",
    )


def _free_mib(path: str) -> int | None:
    """MiB that are free in the file system of a folder; None if there is no such folder."""
    try:
        room = os.statvfs(path)
    except OSError:
        return None
    return room.f_bavail * room.f_frsize >> 20


def state_folder(path: str, mounts: str, *, root: bool) -> Iterator[CheckResult]:
    """Whether the state folder, which must survive a reboot, is on a disk and writable."""
    kind = filesystem_of(path, mounts)
    if kind in ("tmpfs", "ramfs"):
        yield error("node.state", f"{path} is on {kind}: journals would be lost at a reboot", "use a disk")
        return
    if not Path(path).is_dir():
        yield error("node.state", f"{path} does not exist", f"mkdir -p -m 755 {path}")
        return
    if root and not os.access(path, os.W_OK):
        yield error("node.state", f"{path} cannot be written", "is the disk mounted read-only?")
        return
    room = os.statvfs(path)
    free = room.f_bavail * room.f_frsize
    if free < 1 << 30:
        yield warn(
            "node.state", f"{path} has {free >> 20} MiB left", "free some space: images are copied there"
        )
        return
    yield ok("node.state", f"{path} is on {kind}, {free >> 30} GiB free")


def acknowledgements(config: Config) -> Iterator[CheckResult]:
    """Whether vhpcd has the acknowledgements of this node; only root can read them."""
    folder, name = Layout(config).outbox, "node.outbox"
    aside, waiting = outbox.set_aside(folder), len(outbox.pending(folder))
    if aside:
        yield error(
            name,
            f"{len(aside)} acknowledgements were set aside: vhpcd cannot use {aside[0].stem}",
            f"the reason is in hooks.log and in the log of vhpcd; see {folder}, and run: vhpc reconcile",
        )
    elif waiting:
        yield warn(
            name,
            f"{waiting} acknowledgements wait for vhpcd",
            "network identities of their jobs stay in use until then; run: vhpc reconcile",
        )
    else:
        yield ok(name, "no acknowledgement waits for vhpcd")


def filesystem_of(path: str, mounts: str) -> str:
    """Type of the file system that holds a path, from the text of /proc/mounts."""
    best, kind = "", "an unknown file system"
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        point = _OCTAL.sub(lambda match: chr(int(match[1], 8)), fields[1])
        inside = point in ("/", path) or path.startswith(f"{point}/")
        if inside and len(point) >= len(best):
            best, kind = point, fields[2]
    return kind


def apparmor(config: Config, root: Path) -> CheckResult:
    """Whether AppArmor lets QEMU open virtiofs sockets, which libvirt's profiles do not cover.

    Args:
        config: names the run folder whose sockets QEMU opens.
        root: root of the tree with /sys and /etc.
    """
    name, run = "node.apparmor", config.paths.run
    try:
        enabled = (root / "sys/module/apparmor/parameters/enabled").read_text(encoding="ascii").strip()
    except OSError:
        enabled = "N"
    if enabled != "Y":
        return ok(name, "AppArmor is not in use")
    etc = root / "etc/apparmor.d"
    places = [
        etc / "local/abstractions/libvirt-qemu",
        *sorted((etc / "abstractions/libvirt-qemu.d").glob("*")),
    ]
    for place in places:
        if place.is_file() and run in place.read_text(encoding="utf-8", errors="replace"):
            return ok(name, f"AppArmor has a rule for {run} in /{place.relative_to(root)}")
    return warn(
        name,
        f"AppArmor is in use and no rule for QEMU names {run}: guests with shares may fail to start",
        f'add the line "{run}/jobs/*/*/*.sock rw," to /etc/apparmor.d/abstractions/libvirt-qemu.d/vhpc '
        "(Debian 12: /etc/apparmor.d/local/abstractions/libvirt-qemu)",
    )


def _group_number(name: str) -> int | None:
    try:
        return accounts.group_id(name)
    except VhpcError:
        return None


def _version_of(path: str) -> tuple[int, str]:
    """(exit status, first output) of ``path --version``; 127 and the reason when it cannot be run."""
    try:
        done = subprocess.run(
            [path, "--version"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return 127, f"no answer within {TIMEOUT_S} s"
    except OSError as err:
        return 127, err.strerror or str(err)
    text = (done.stdout.strip() or done.stderr.strip()) or f"exit status {done.returncode}"
    return done.returncode, text
