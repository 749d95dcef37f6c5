# SPDX-License-Identifier: Apache-2.0
"""/etc/vhpc/vhpc.toml: every key with its meaning and default.

Nodes and the controller use the same file; an unknown key or a wrong type
is an error that names the file and the key.  ``describe()`` yields the text
for the manual, so that the manual always agrees with the code.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import msgspec

from vhpc_slurm.config.checkpoint import Checkpoint
from vhpc_slurm.config.controller import Controller
from vhpc_slurm.config.database import Database
from vhpc_slurm.config.disks import Disks
from vhpc_slurm.config.fabric import Fabric, Manager, Subnet
from vhpc_slurm.config.images import Images
from vhpc_slurm.config.login import Login
from vhpc_slurm.config.network import Network
from vhpc_slurm.config.policy import Rule, check_rules
from vhpc_slurm.config.setting import documented
from vhpc_slurm.config.shares import Shares
from vhpc_slurm.errors import NodeError
from vhpc_slurm.undecodable import UNDECODABLE

DEFAULT_PATH = Path("/etc/vhpc/vhpc.toml")
TABLES = (("fabric.subnets", Subnet), ("fabric.subnets.managers", Manager), ("policy", Rule))
"""Arrays of tables, and the class of each."""
GPU_BOOT_S = 60
"""Additional boot time for each GPU, in seconds: docs/memory.md."""


class Paths(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Folders of vhpc's files."""

    state: Annotated[
        str, documented("journal, tombstones, timelines, queued acknowledgements; survives a reboot")
    ] = "/var/lib/vhpc"
    run: Annotated[str, documented("sockets and state files of running jobs; on a tmpfs")] = "/run/vhpc"
    log: Annotated[str, documented("logs of hooks and consoles of guests")] = "/var/log/vhpc"
    libexec: Annotated[str, documented("vhpc-shim, vhpc-run, the hooks and the image builder")] = (
        "/usr/libexec/vhpc"
    )


class Guests(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Properties of guests."""

    libvirt_uri: Annotated[str, documented("libvirt connection of the node")] = "qemu:///system"
    accelerator: Annotated[
        Literal["auto", "kvm", "tcg"],
        documented(
            "kvm, tcg (software, slow), or auto: kvm if /dev/kvm opens and the CPU has svm or vmx, else tcg"
        ),
    ] = "auto"
    emulator: Annotated[str, documented("QEMU binary; empty means libvirt's choice")] = ""
    emulated: Annotated[
        tuple[Literal["x86_64", "aarch64"], ...],
        documented(
            "architectures of images that nodes of another one start too, in software; for tests only, with "
            'accelerator = "tcg"'
        ),
    ] = ()
    uid_base: Annotated[
        int, documented("first uid of the range that QEMU processes run under, one per guest", ge=1000)
    ] = 700000
    uid_count: Annotated[int, documented("size of that range", ge=1, le=65536)] = 8192
    uid_check_paths: Annotated[
        tuple[str, ...],
        documented(
            "world-writable folders of the node: a uid of the range is used again only if it owns no file "
            "in them"
        ),
    ] = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108 - only searched, never opened
    qemu_group: Annotated[str, documented("group of QEMU processes; it must have access to /dev/kvm")] = "kvm"
    memory_reserve_mib: Annotated[
        int, documented("memory of a job's allocation on a node that stays outside its guests, in MiB", ge=0)
    ] = 256
    boot_timeout_s: Annotated[
        int, documented("deadline from the start of a guest until its agent is ready", ge=1, le=3600)
    ] = 120
    boot_timeout_max_s: Annotated[
        int,
        documented(
            "largest --vhpc-timeout that users may set, if it is more than boot_timeout_s; "
            "PrologEpilogTimeout of slurm.conf must allow it",
            ge=1,
            le=3600,
        ),
    ] = 180
    stage_timeout_s: Annotated[int, documented("deadline of any other single stage", ge=1, le=3600)] = 60
    check: Annotated[
        tuple[str, ...],
        documented(
            "command that runs as root in each guest before the job starts, with an absolute path; guests "
            "without this program are not checked. 0: the guest is well; 78, 126, 127: the job is at fault "
            "and fails; any other status, or check_timeout_s: the node is drained and the job requeued "
            "(images.md). Empty: no check"
        ),
    ] = ()
    check_timeout_s: Annotated[
        int,
        documented(
            "deadline of that command; PrologEpilogTimeout of slurm.conf must allow it", ge=1, le=3600
        ),
    ] = 60
    poweroff_timeout_s: Annotated[
        int, documented("how long a guest may take to power off before it is destroyed", ge=0)
    ] = 5
    cgroups: Annotated[
        Literal["required", "off"],
        documented(
            "required: the guests of a job and their helper processes have a separate control group "
            "with limits, and end with it; off: for a node without cgroups, where the job's user can "
            "escape these limits"
        ),
    ] = "required"
    helper_memory_mib: Annotated[
        int,
        documented(
            "memory that the helper processes of a guest (virtiofsd, vhpc-locks, vhpc-shim) may use, in MiB; "
            "the kernel ends processes that exceed it",
            ge=64,
        ),
    ] = 1024
    qemu_memory_slack_mib: Annotated[
        int,
        documented(
            "memory that QEMU may use in addition to its guest's, in MiB, before the kernel ends it", ge=256
        ),
    ] = 2048
    console_limit_kib: Annotated[
        int,
        documented(
            "how much of a guest's console is copied for the user; beginning and end are kept",
            ge=1,
            le=1 << 20,
        ),
    ] = 1024

    @property
    def check_s(self) -> int:
        """Longest time that the check of guests adds to a Prolog, in seconds."""
        return self.check_timeout_s if self.check else 0

    def longest_boot_s(self, gpus: int) -> int:
        """Largest boot timeout that a user may set, in seconds, for a guest with ``gpus`` GPUs.

        Slurm kills a Prolog that takes longer than Slurm allows, and drains the node.
        """
        return max(self.boot_timeout_s, self.boot_timeout_max_s) + gpus * GPU_BOOT_S


class Host(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The node itself."""

    sysfs_root: Annotated[str, documented("root of the sysfs tree to read")] = "/sys"
    metrics_folder: Annotated[
        str,
        documented(
            "folder of the textfile collector of Prometheus' node_exporter; health checks write vhpc.prom "
            "there; empty: no metrics of nodes",
            pattern=r"^(|/[^\x00]+)$",
        ),
    ] = ""
    emulator_cpus: Annotated[
        str, documented("OS CPU list for QEMU's own threads, not managed by Slurm; empty: the job's own CPUs")
    ] = ""
    hugepages: Annotated[
        tuple[str, ...],
        documented(
            "pools of huge pages that vhpc node-setup creates at boot: SIZE:CELL=COUNT, SIZE 2M, 512M or 1G, "
            'like "1G:0=64"'
        ),
    ] = ()
    preloaded_hooks_s: Annotated[
        int,
        documented(
            "how long a process with the Python of Prolog and Epilog in memory (some 40 MiB) waits for the "
            "next one after an Epilog, in seconds; 0: no process",
            ge=0,
            le=86400,
        ),
    ] = 600
    commands: Annotated[
        tuple[str, ...], documented("Slurm commands that work inside guests by running on the host")
    ] = (
        "srun",
        "sbatch",
        "salloc",
        "sattach",
        "scontrol",
        "squeue",
        "sinfo",
        "sprio",
        "sshare",
        "sacct",
        "sacctmgr",
        "scancel",
        "sstat",
        "sbcast",
        "strigger",
    )


Firmness = Literal["preferred", "strict"]


class Placement(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How an allocation becomes guests; a strict rule refuses a job, a preferred one does not."""

    cores: Annotated[
        Firmness, documented("strict: an allocation with parts of cores is refused, as the node's fault")
    ] = "preferred"
    memory: Annotated[
        Firmness,
        documented("strict: a job fails if its memory cannot be bound safely to the NUMA cells of its CPUs"),
    ] = "preferred"
    devices: Annotated[
        Firmness, documented("strict: a job fails if its GPUs or VFs are at none of its NUMA cells")
    ] = "preferred"
    hugepages: Annotated[
        Literal["none", "2M", "512M", "1G", "auto"],
        documented(
            "pages of guest memory from the node's pools; auto: the largest size that suffices, else "
            "ordinary. An Arm kernel with pages of 64 KiB has 2M and 512M, other kernels have 2M and 1G"
        ),
    ] = "none"
    rounding: Annotated[
        Firmness,
        documented(
            "preferred: memory that is not a multiple of the page is rounded down; strict: such a job fails"
        ),
    ] = "preferred"
    emulator_core: Annotated[
        bool,
        documented(
            "a guest with several cores leaves one to QEMU's own threads, unless host.emulator_cpus is set"
        ),
    ] = False
    gpu_gres: Annotated[str, documented("Slurm's name of the generic resource for GPUs")] = "gpu"
    gpu_map: Annotated[
        str,
        documented(
            "file with the PCI address of each GPU: lines INDEX ADDRESS [MODULE], in the order of gres.conf. "
            "INDEX ADDRESS mdev=TYPE is a mediated device that is created for each job at this GPU, "
            "INDEX ADDRESS vgpu=TYPE a virtual function that NVIDIA's driver makes a vGPU"
        ),
    ] = "/etc/vhpc/gpu.map"
    vf_gres: Annotated[
        str, documented("Slurm's name of the count-only generic resource for virtual functions")
    ] = "ibvf"


class Devices(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """PCI functions for guests."""

    allow: Annotated[
        tuple[str, ...],
        documented(
            'VENDOR:DEVICE ids of functions for guests, like "10de:2330"; empty: those in the GPU map, and '
            "virtual functions of network adapters. A GPU of the map that is listed here may have any class"
        ),
    ] = ()
    reset_methods: Annotated[
        tuple[str, ...],
        documented(
            "the kernel's reset methods that are trusted to clear a device; bus only if all functions "
            "behind the bridge belong to the same job"
        ),
    ] = ("device_specific", "flr", "af_flr", "bus")
    timeout_s: Annotated[
        int,
        documented(
            "how long the kernel may take to unbind, bind or reset a device; then it is stuck", ge=1, le=600
        ),
    ] = 30
    gpu_scrub: Annotated[
        tuple[str, ...],
        documented(
            "command that clears a GPU's memory after each guest, with an absolute path; {address} is its "
            "PCI address; empty: nvidia_gpu_tools.py of NVIDIA's gpu-admin-tools for NVIDIA's GPUs from "
            "Turing on, if it is installed, else only the reset"
        ),
    ] = ()
    virtual_functions: Annotated[
        tuple[str, ...],
        documented(
            "number of virtual functions that vhpc node-setup creates at boot: PF=COUNT, with the address of "
            'the physical function, like "0000:3b:00.0=8"'
        ),
    ] = ()
    fmpm: Annotated[
        tuple[str, ...],
        documented(
            "command that manages the node's NVSwitch partitions, with its options: fmpm of NVIDIA's "
            "Fabric-Manager-Client, with an absolute path; the GPU map then needs each GPU's module. Empty: "
            "no partitions are activated"
        ),
    ] = ()
    fabric_manager: Annotated[
        tuple[str, ...],
        documented(
            "command that prints the version of the Fabric Manager of devices.fmpm, with an absolute path; "
            '["/bin/echo", "580.95.05"] for one in a service VM. Guests need NVIDIA\'s driver of exactly '
            "this version. Empty: nv-fabricmanager --version, if the node has it"
        ),
    ] = ()
    scrub_timeout_s: Annotated[
        int, documented("deadline of devices.gpu_scrub, and of ending MIG mode before", ge=1, le=3600)
    ] = 120


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The whole file, with one TOML table per section."""

    paths: Paths = Paths()
    controller: Controller = Controller()
    database: Database = Database()
    images: Images = Images()
    guests: Guests = Guests()
    shares: Shares = Shares()
    disks: Disks = Disks()
    checkpoint: Checkpoint = Checkpoint()
    host: Host = Host()
    placement: Placement = Placement()
    devices: Devices = Devices()
    fabric: Fabric = Fabric()
    network: Network = Network()
    login: Login = Login()
    policy: tuple[Rule, ...] = ()

    def __post_init__(self) -> None:
        """ValueError, which names the keys, when they contradict each other or a rule cannot be applied."""
        if self.controller.backup_hosts and self.database.engine != "mariadb":
            raise ValueError(
                'controller.backup_hosts needs database.engine = "mariadb": several vhpcd share one database'
            )
        if self.guests.check and not self.guests.check[0].startswith("/"):
            raise ValueError("guests.check needs the absolute path of a program in guests")
        if self.guests.emulated and self.guests.accelerator != "tcg":
            raise ValueError('guests.emulated is for tests and needs guests.accelerator = "tcg"')
        check_rules(self)


def load(path: Path | None = None) -> Config:
    """Read the configuration.

    Args:
        path: the file; default is ``$VHPC_CONFIG``, then ``/etc/vhpc/vhpc.toml``.
            An absent default file means all defaults.

    Raises:
        NodeError: unreadable, not TOML, unknown key, or wrong type.
    """
    named = path is not None or "VHPC_CONFIG" in os.environ
    path = path or Path(os.environ.get("VHPC_CONFIG", str(DEFAULT_PATH)))
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if named:
            raise NodeError(f"cannot read {path}", "no such file") from None
        return Config()
    except (OSError, *UNDECODABLE) as err:
        raise NodeError(f"cannot read {path}", str(err)) from err
    try:
        return msgspec.convert(raw, Config)
    except msgspec.ValidationError as err:
        raise NodeError(f"{path} is not valid", str(err), "see vhpc.toml(5)") from err


def describe() -> Iterator[tuple[str, str, Any, str]]:
    """Yield (section, key, default, meaning) for every key, in file order."""
    default = Config()
    for section in Config.__struct_fields__:
        part = getattr(default, section)
        if isinstance(part, tuple):  # an array of tables
            continue
        hints = get_type_hints(type(part), include_extras=True)
        for key in part.__struct_fields__:
            meta = next(m for m in get_args(hints[key]) if isinstance(m, msgspec.Meta))
            yield section, key, getattr(part, key), meta.description or ""


def describe_tables() -> Iterator[tuple[str, type[msgspec.Struct], str, Any, str]]:
    """Yield (table, its class, key, default, meaning) for arrays of tables; ``NODEFAULT``: no default."""
    for table, kind in TABLES:
        hints = get_type_hints(kind, include_extras=True)
        for one in msgspec.structs.fields(kind):
            meta = next(m for m in get_args(hints[one.name]) if isinstance(m, msgspec.Meta) and m.description)
            yield table, kind, one.name, one.default, meta.description or ""
