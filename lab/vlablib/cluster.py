# SPDX-License-Identifier: Apache-2.0
"""Configuration files of the lab's hosts."""

from __future__ import annotations

import json
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
from vlablib.settings import SLURMCTLD_STATE, USERS, Lab, Record, address, slower, write_atomically
from vlablib.slurmtree import Slurm

_TEMPLATES = INIT.parents[1] / "etc"
_LIBEXEC = "/usr/libexec/vhpc"
_PASSWORD = "/etc/vhpc/db.password"  # noqa: S105 - a path
_NODE_MEMORY_MIB = 6000
# light nodes have no guests whose memory this machine must have
_LIGHT_NODE_MEMORY_MIB = 4096
_HEALTHCHECK_S = 60
# the health checks of many light nodes would use more of this machine's CPUs than their jobs
_MANY_LIGHT_NODES = 16
_MANY_HEALTHCHECK_S = 36000
# limits of Slurm on a quiet machine; those of messages and of the end of a step are its defaults. A Prolog
# needs at most 410 s by the limits of vhpc below and controller.lease_wait_s
_HOOK_LIMIT_S, _MESSAGE_S, _EPILOG_LIMIT_S, _UNKILLABLE_S = 420, 10, 300, 60
_KILL_WAIT_S = 10
_BATCH_START_S = 900
# the end of a step on one of many nodes, which share few CPUs
_MANY_UNKILLABLE_S = 600
# limits of vhpc: three defaults, and two that are small so that tests soon see a node that is not ready
_BOOT_S, _LONGEST_BOOT_S, _STAGE_S, _READY_S, _REACH_S = 120, 180, 60, 60, 10
# tests look at jobs that ended while they waited for others
_MIN_JOB_AGE_S = 3600
# the default: slurmctld's memory must not depend on how long an endurance run is
_LIGHT_MIN_JOB_AGE_S = 300
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
    for folder, owner, mode in _folders(record, host):
        if owner not in accounts:
            continue  # of a host that does not have vhpc yet
        path = root / folder.lstrip("/")
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(mode)
        os.chown(path, *accounts[owner])
    other_socket_folder = root / "run/mariadbd"
    if host == record.database and not other_socket_folder.is_symlink():
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


def make_shared_folders(lab: Lab, record: Record) -> None:
    """Create the folders that hosts share: homes, scratch, catalogue, deployed files, slurmctld's state."""
    if record.controllers > 1:
        lab.slurmctld.mkdir(parents=True, exist_ok=True)
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
    if not database_password(lab).exists():
        write_atomically(database_password(lab), os.urandom(16).hex(), 0o600)


def database_password(lab: Lab) -> Path:
    """File with the password of vhpcd's user in MariaDB."""
    return lab.state / "db.password"


def _folders(record: Record, host: str) -> Iterator[tuple[str, str, int]]:
    yield "/run/munge", "munge", 0o755
    yield "/var/log/slurm", "slurm", 0o755
    yield "/var/lib/slurm", "slurm", 0o755
    if host in record.controller_names:
        yield "/run/slurm", "slurm", 0o755
        yield SLURMCTLD_STATE, "slurm", 0o700
        yield "/var/lib/vhpc/vhpcd", "vhpc", 0o700
        yield "/run/vhpc-hookd", "slurm", 0o700
    if host == record.database:
        yield "/run/slurm", "slurm", 0o755
        yield "/run/mysqld", "mysql", 0o755
    if record.fabric and host in (*record.controller_names, record.database):
        yield fabric.RUN, "vhpc", 0o755
        yield f"{fabric.RUN}/readers", "vhpc", 0o1777
        yield "/etc/opensm", "vhpc", 0o755
    if host in record.node_names:
        yield "/var/lib/slurm/slurmd", "root", 0o755
        yield "/run/vhpc", "root", 0o755
        if record.fabric:
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
    if record.controllers > 1:
        commands += f"backup_hosts = {json.dumps(record.controller_names[1:])}\n"
    guests = 'libvirt_uri = "test:///default"\n' if record.light else ""
    vhpc = _fill(
        "vhpc.toml.in",
        slurm_bin=commands,
        virtiofsd=suite.virtiofsd,
        site=site,
        guests=guests,
        boot=str(slower(_BOOT_S)),
        longest_boot=str(slower(_LONGEST_BOOT_S)),
        stage=str(slower(_STAGE_S)),
        ready=str(slower(_READY_S)),
        reach=str(slower(_REACH_S)),
    )
    if record.fabric:
        vhpc += _fill("fabric.toml")
        if record.controllers > 1 and host in record.controller_names:
            command = json.dumps(["socat", "-", f"TCP:{record.database}:{fabric.MANAGER_PORT}"])
            vhpc += f"\n[[fabric.subnets]]\n\n[[fabric.subnets.managers]]\ncommand = {command}\n"
    if record.controllers > 1:
        vhpc += _fill("database.toml.in", host=record.database, password=_PASSWORD)
    if not record.bare:  # an administrator writes them there
        yield ConfigFile("/etc/vhpc/vhpc.toml", vhpc, read_by=("vhpcd",))
        yield ConfigFile(f"{etc}/plugstack.conf", _plugstack(lab, record, host), read_by=("slurmd",))
    if record.controllers > 1 and host in record.controller_names:
        secret = database_password(lab).read_text(encoding="utf-8")
        yield ConfigFile(_PASSWORD, secret, 0o600, "vhpc", ("vhpcd",))
    if record.fabric and host in (*record.controller_names, record.database):
        yield from _fabric_files(record, host)
    if host == record.database:
        accounting = _fill("slurmdbd.conf.in", host=host)
        yield ConfigFile(f"{etc}/slurmdbd.conf", accounting, 0o600, "slurm", ("slurmdbd",))
        if record.controllers > 1:
            file = "/etc/mysql/mariadb.conf.d/99-vlab.cnf"
            yield ConfigFile(file, _fill("mariadb.cnf"), read_by=("mariadbd",))
    elif host in record.node_names:
        yield ConfigFile("/etc/libvirt/qemu.conf", _fill("qemu.conf"), 0o600, read_by=("libvirtd",))
        libvirtd = _fill("libvirtd.conf.in", uuid=str(identity))
        yield ConfigFile("/etc/libvirt/libvirtd.conf", libvirtd, read_by=("libvirtd",))


def _fabric_files(record: Record, host: str) -> Iterator[ConfigFile]:
    simulated = ("ibsim", "opensm")
    yield ConfigFile(fabric.PORT_MAP, fabric.port_map(record.node_names), read_by=("vhpcd",))
    if host == record.database:
        yield ConfigFile(fabric.NET, fabric.net(record.node_names), read_by=simulated)
        yield ConfigFile("/etc/opensm/opensm.conf", fabric.OPENSM_CONF, read_by=("opensm",))
        yield ConfigFile(fabric.PARTITIONS, fabric.FIRST_PARTITIONS, owner="vhpc", first_only=True)
    packages = next(Path(record.rootfs).glob("opt/vhpc/lib/python3.*/site-packages"))
    folder = "/" + str(packages.relative_to(record.rootfs))
    client = fabric.CLIENT if record.controllers == 1 else fabric.remote_client(record.database)
    yield ConfigFile(f"{folder}/{fabric.READER}.py", fabric.reader_code(client))
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
    memory = _LIGHT_NODE_MEMORY_MIB if record.light else memory
    topology = _cpu_topology()
    nodes = "\n".join(
        f"NodeName={name} NodeAddr={address(name)} {topology} RealMemory={memory}"
        for name in record.node_names
    )
    controllers = "\n".join(f"SlurmctldHost={name}" for name in record.controller_names)
    if record.controllers > 1:
        # short, so that tests of takeovers are quick; the default is 120
        controllers += "\nSlurmctldTimeout=15"
    return _fill(
        "slurm.conf.in",
        etc=slurm.conf,
        controllers=controllers,
        database=record.database,
        job_age=str(_LIGHT_MIN_JOB_AGE_S if record.light else _MIN_JOB_AGE_S),
        vhpc="# nothing of vhpc" if record.bare else _slurm_conf_of_vhpc(lab, record, version),
        nodes=nodes,
        kill_wait=str(slower(_KILL_WAIT_S)),
    )


def _slurm_conf_of_vhpc(lab: Lab, record: Record, version: tuple[int, ...]) -> str:
    hooks, epilog = slower(_HOOK_LIMIT_S), slower(_EPILOG_LIMIT_S)
    timeouts = f"PrologEpilogTimeout={hooks}"
    if version >= (25, 5):
        timeouts = f"PrologTimeout={hooks}\nEpilogTimeout={epilog}"
    # when the end of a step takes longer, Slurm drains the node ("Kill task failed")
    unkillable = _MANY_UNKILLABLE_S if record.light else slower(_UNKILLABLE_S)
    timeouts += f"\nUnkillableStepTimeout={unkillable}\nMessageTimeout={slower(_MESSAGE_S)}"
    return _fill(
        "slurm-vhpc.conf.in",
        batch_start=str(slower(_BATCH_START_S)),
        script_timeouts=timeouts,
        scripts=_scripts(lab, record),
    )


def _scripts(lab: Lab, record: Record) -> str:
    """Name only deployed hooks in slurm.conf, so that the lab also runs without them."""
    many = record.light and record.nodes > _MANY_LIGHT_NODES
    hooks = {
        "prolog": "Prolog={}",
        "epilog": "Epilog={}",
        "prolog-slurmctld": "PrologSlurmctld={}",
        "epilog-slurmctld": "EpilogSlurmctld={}",
        # twice as often as recommended, because tests wait for it
        "healthcheck": (
            "HealthCheckProgram={}\n"
            f"HealthCheckInterval={_MANY_HEALTHCHECK_S if many else _HEALTHCHECK_S}\n"
            "HealthCheckNodeState=ANY,CYCLE"
        ),
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
