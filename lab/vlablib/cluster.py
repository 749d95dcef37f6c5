# SPDX-License-Identifier: Apache-2.0
"""Configuration files of the lab's hosts."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from string import Template

from vlablib import fabric, slurmtree
from vlablib.packages import of_host
from vlablib.recipe import named
from vlablib.running import INIT
from vlablib.settings import USERS, Lab, Record, address, write_atomically
from vlablib.slurmtree import Slurm

_TEMPLATES = INIT.parents[1] / "etc"
_LIBEXEC = "/usr/libexec/vhpc"
_NODE_MEMORY_MIB = 6000
# for the machine itself and the controller's daemons
_KEPT_MEMORY_MIB = 2048


@dataclass(frozen=True)
class ConfigFile:
    """One file of one host."""

    path: str
    text: str
    mode: int = 0o644
    owner: str = "root"
    # units that read the file only when they start
    read_by: tuple[str, ...] = ()
    # written only if it is missing; others change it later
    first_only: bool = False


def configure(lab: Lab, record: Record, host: str, pid: int) -> set[str]:
    """Update a running host's files; return the units that must be restarted."""
    root = Path(f"/proc/{pid}/root")
    accounts = read_accounts(root)
    stale: set[str] = set()
    for folder, owner, mode in _folders(host, fabric_too=record.fabric):
        if owner not in accounts:
            continue  # of a host that does not have vhpc yet
        path = root / folder.lstrip("/")
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(mode)
        os.chown(path, *accounts[owner])
    other_socket_folder = root / "run/mariadbd"
    if host == "ctl" and not other_socket_folder.is_symlink():
        # the client's default path differs between versions of MariaDB
        other_socket_folder.symlink_to("mysqld")
    sbcast = root / "usr/local/bin/sbcast"
    if not sbcast.is_symlink() and not record.bare:
        sbcast.symlink_to(f"{_LIBEXEC}/vhpc-sbcast")
    slurm = slurmtree.look(Path(record.rootfs))
    plugin = root / slurm.plugins.lstrip("/") / "vhpc.so"
    if not (plugin.is_symlink() or record.packages or record.bare):  # trees of the recipe have it
        plugin.symlink_to(f"{_LIBEXEC}/vhpc.so")
    for file in _files(lab, record, host, slurm):
        path = root / file.path.lstrip("/")
        if file.first_only and path.exists():
            continue
        if record.bare and not path.parent.is_dir():
            continue  # of a package that the host does not have yet
        if write_atomically(path, file.text, file.mode):
            stale.update(file.read_by)
        os.chown(path, *accounts[file.owner])
    return stale


def read_accounts(root: Path) -> dict[str, tuple[int, int]]:
    """Return (uid, gid) by name from a host's own passwd file."""
    accounts = {}
    for line in (root / "etc/passwd").read_text(encoding="utf-8").splitlines():
        name, _, uid, gid, *_ = line.split(":")
        accounts[name] = (int(uid), int(gid))
    return accounts


def make_shared_folders(lab: Lab) -> None:
    """Create the folders that all hosts share: homes, scratch, catalogue, deployed files."""
    installed = (lab.deployed / "libexec", lab.deployed / "python")
    for folder in (lab.home, lab.scratch, lab.shared / "vhpc/catalog", *installed):
        folder.mkdir(parents=True, exist_ok=True)
    lab.data.chmod(0o700)
    lab.scratch.chmod(0o1777)
    for user in USERS:
        home = lab.home / user.name
        if not home.exists():
            home.mkdir(mode=0o700)
            os.chown(home, user.uid, user.uid)
    key = lab.state / "munge.key"
    if not key.exists():
        write_atomically(key, os.urandom(64).hex(), 0o600)


def _folders(host: str, *, fabric_too: bool) -> Iterator[tuple[str, str, int]]:
    yield "/run/munge", "munge", 0o755
    yield "/var/log/slurm", "slurm", 0o755
    yield "/var/lib/slurm", "slurm", 0o755
    if host == "ctl":
        yield "/run/slurm", "slurm", 0o755
        yield "/var/lib/slurm/slurmctld", "slurm", 0o700
        yield "/run/mysqld", "mysql", 0o755
        yield "/var/lib/vhpc/vhpcd", "vhpc", 0o700
        if fabric_too:
            yield fabric.RUN, "vhpc", 0o755
            yield f"{fabric.RUN}/readers", "vhpc", 0o1777
            yield "/etc/opensm", "vhpc", 0o755
    elif host != "login":
        yield "/var/lib/slurm/slurmd", "root", 0o755
        yield "/run/vhpc", "root", 0o755
        if fabric_too:
            yield fabric.HCA, "root", 0o755


def _files(lab: Lab, record: Record, host: str, slurm: Slurm) -> Iterator[ConfigFile]:
    slurm_units, etc = ("slurmctld", "slurmd"), slurm.conf
    version = slurmtree.version(Path(record.rootfs))
    identity = uuid.uuid5(uuid.NAMESPACE_DNS, host)
    suite = named(record.suite)
    yield ConfigFile("/etc/hostname", f"{host}\n")
    yield ConfigFile("/etc/machine-id", f"{identity.hex}\n")
    yield ConfigFile("/etc/hosts", _hosts(record))
    key = (lab.state / "munge.key").read_text(encoding="utf-8")
    yield ConfigFile("/etc/munge/munge.key", key, 0o400, "munge", ("munged",))
    conf = _slurm_conf(lab, record, slurm)
    yield ConfigFile(f"{etc}/slurm.conf", conf, read_by=slurm_units, first_only=record.bare)
    task_prolog = (_TEMPLATES / "task-prolog").read_text(encoding="utf-8")
    yield ConfigFile(f"{etc}/task-prolog", task_prolog, 0o755)
    # 22.05 requires a plugin; that of v1 changes no cgroup unless requested
    plugin = "disabled" if version >= (23, 11) else "cgroup/v1"
    yield ConfigFile(f"{etc}/cgroup.conf", f"CgroupPlugin={plugin}\n", read_by=slurm_units)
    shared = ("/scratch", fabric.HCA) if record.fabric else ("/scratch",)
    site = ", ".join(f'"{folder}"' for folder in shared)
    commands = "" if slurm.prefix == "/usr" else f'slurm_bin = "{slurm.bin}"\n'
    vhpc = _fill("vhpc.toml.in", slurm_bin=commands, virtiofsd=suite.virtiofsd, site=site)
    if record.fabric:
        vhpc += _fill("fabric.toml")
    if not record.bare:  # an administrator writes them there
        yield ConfigFile("/etc/vhpc/vhpc.toml", vhpc, read_by=("vhpcd",))
        yield ConfigFile(f"{etc}/plugstack.conf", _plugstack(lab, record, host), read_by=("slurmd",))
    if host == "ctl" and record.fabric:
        yield from _fabric_files(record)
    if host == "ctl":
        yield ConfigFile(f"{etc}/slurmdbd.conf", _fill("slurmdbd.conf"), 0o600, "slurm", ("slurmdbd",))
    elif host != "login":
        yield ConfigFile("/etc/libvirt/qemu.conf", _fill("qemu.conf"), 0o600, read_by=("libvirtd",))
        libvirtd = _fill("libvirtd.conf.in", uuid=str(identity))
        yield ConfigFile("/etc/libvirt/libvirtd.conf", libvirtd, read_by=("libvirtd",))


def _fabric_files(record: Record) -> Iterator[ConfigFile]:
    simulated = ("ibsim", "opensm")
    yield ConfigFile(fabric.NET, fabric.net(record.node_names), read_by=simulated)
    yield ConfigFile(fabric.PORT_MAP, fabric.port_map(record.node_names), read_by=("vhpcd",))
    yield ConfigFile("/etc/opensm/opensm.conf", fabric.OPENSM_CONF, read_by=("opensm",))
    yield ConfigFile(fabric.PARTITIONS, fabric.FIRST_PARTITIONS, owner="vhpc", first_only=True)
    packages = next(Path(record.rootfs).glob("opt/vhpc/lib/python3.*/site-packages"))
    folder = "/" + str(packages.relative_to(record.rootfs))
    yield ConfigFile(f"{folder}/{fabric.READER}.py", fabric.READER_CODE)
    yield ConfigFile(f"{folder}/{fabric.READER}.pth", f"import {fabric.READER}\n")


def _fill(template: str, **values: str) -> str:
    return Template((_TEMPLATES / template).read_text(encoding="utf-8")).substitute(values)


def _hosts(record: Record) -> str:
    lines = ["127.0.0.1 localhost", *(f"{address(host)} {host}" for host in record.hosts)]
    return "\n".join(lines) + "\n"


def _plugstack(lab: Lab, record: Record, host: str) -> str:
    # required: the lab's plugin fits its Slurm version, and a broken one must cause an error
    packaged = bool(record.packages) and "vhpc-spank-plugin" in of_host(host)
    present = packaged or (not record.packages and (lab.deployed / "libexec/vhpc.so").exists())
    return "required vhpc.so\n" if present else "# vhpc.so is not deployed\n"


def _slurm_conf(lab: Lab, record: Record, slurm: Slurm) -> str:
    version = slurmtree.version(Path(record.rootfs))
    memory = max(1024, min(_NODE_MEMORY_MIB, (_machine_memory_mib() - _KEPT_MEMORY_MIB) // record.nodes))
    topology = _cpu_topology()
    nodes = "\n".join(
        f"NodeName={name} NodeAddr={address(name)} {topology} RealMemory={memory}"
        for name in record.node_names
    )
    vhpc = "# nothing of vhpc" if record.bare else _slurm_conf_of_vhpc(lab, record, version)
    return _fill("slurm.conf.in", etc=slurm.conf, vhpc=vhpc, nodes=nodes)


def _slurm_conf_of_vhpc(lab: Lab, record: Record, version: tuple[int, ...]) -> str:
    timeouts = "PrologTimeout=400\nEpilogTimeout=300" if version >= (25, 5) else "PrologEpilogTimeout=400"
    return _fill("slurm-vhpc.conf.in", script_timeouts=timeouts, scripts=_scripts(lab, record))


def _scripts(lab: Lab, record: Record) -> str:
    """Name only deployed hooks in slurm.conf, so that the lab also runs without them."""
    hooks = {
        "prolog": "Prolog={}",
        "epilog": "Epilog={}",
        "prolog-slurmctld": "PrologSlurmctld={}",
        "epilog-slurmctld": "EpilogSlurmctld={}",
        # twice as often as recommended, because tests wait for it
        "healthcheck": "HealthCheckProgram={}\nHealthCheckInterval=60\nHealthCheckNodeState=ANY,CYCLE",
    }
    deployed = lab.deployed / "libexec"
    present = [
        line.format(f"{_LIBEXEC}/{name}")
        for name, line in hooks.items()
        if record.packages or (deployed / name).exists()
    ]
    return "\n".join(present) or "# no hooks are deployed"


def _machine_memory_mib() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2**20


def _cpu_topology() -> str:
    """Describe the real machine's CPUs for slurm.conf(5), from the kernel's topology files."""
    packages: set[str] = set()
    cores: set[tuple[str, str]] = set()
    cpus = 0
    for cpu in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/topology"):
        package = (cpu / "physical_package_id").read_text(encoding="ascii").strip()
        core = (cpu / "core_id").read_text(encoding="ascii").strip()
        packages.add(package)
        cores.add((package, core))
        cpus += 1
    sockets = max(1, len(packages))
    per_socket = max(1, len(cores) // sockets)
    threads = max(1, cpus // max(1, len(cores)))
    if sockets * per_socket * threads != cpus:
        return f"CPUs={os.cpu_count()}"
    return f"CPUs={cpus} Sockets={sockets} CoresPerSocket={per_socket} ThreadsPerCore={threads}"
