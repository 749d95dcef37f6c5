# SPDX-License-Identifier: Apache-2.0
"""/etc/vhpc/vhpc.toml: every key, its meaning and its default, in one place.

The same file serves nodes and the controller; an unknown key or a wrong type
is an error that names the file and the key.  ``describe()`` yields the text
for the manual, so that documentation cannot drift from the code.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import msgspec

from vhpc_slurm.config.fabric import Fabric, Manager, Subnet
from vhpc_slurm.config.setting import documented
from vhpc_slurm.errors import UNDECODABLE, NodeError

DEFAULT_PATH = Path("/etc/vhpc/vhpc.toml")
GPU_BOOT_S = 60
"""What a boot may take longer for each GPU: docs/memory.md."""


class Paths(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where vhpc keeps its files."""

    state: Annotated[
        str, documented("journal, tombstones, timelines, queued acknowledgements; survives a reboot")
    ] = "/var/lib/vhpc"
    run: Annotated[str, documented("sockets and state files of running jobs; a tmpfs")] = "/run/vhpc"
    log: Annotated[str, documented("logs of hooks and consoles of guests")] = "/var/log/vhpc"
    libexec: Annotated[str, documented("vhpc-shim, vhpc-run and the hooks")] = "/usr/libexec/vhpc"


class Controller(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """vhpcd, the controller service."""

    host: Annotated[str, documented("host name or address that nodes reach vhpcd at")] = "localhost"
    listen: Annotated[str, documented("address that vhpcd listens on")] = "0.0.0.0"  # noqa: S104 - nodes must reach it; munge decides who is heard
    port: Annotated[int, documented("TCP port of vhpcd", ge=1, le=65535)] = 7633
    user: Annotated[str, documented("user that vhpcd runs as; clients accept answers of no other")] = "vhpc"
    slurm_user: Annotated[
        str, documented("SlurmUser of slurm.conf: beside root the only user vhpcd listens to")
    ] = "slurm"
    database: Annotated[str, documented("SQLite file of the leases")] = "/var/lib/vhpc/vhpcd/leases.sqlite"
    munge_socket: Annotated[str, documented("munged's socket; empty means munge's own default")] = ""
    request_timeout_s: Annotated[
        int,
        documented(
            "longest wait for an answer of vhpcd; a job's key has to be on the fabric a second sooner",
            ge=1,
            le=600,
        ),
    ] = 10
    lease_wait_s: Annotated[
        int, documented("longest wait of a node for a lease to become READY", ge=1, le=600)
    ] = 60
    slurm_bin: Annotated[
        str, documented("folder of scontrol, squeue, sinfo, scancel and sacctmgr, on every host")
    ] = "/usr/bin"
    slurm_conf: Annotated[
        str, documented("slurm.conf for these commands; empty means Slurm's own default")
    ] = ""
    node_names: Annotated[
        tuple[str, ...],
        documented(
            'further names that nodes have, such as "{node}-ib" with {node} for Slurm\'s name. What is said '
            "in a node's name vhpcd takes only from its addresses: those of its NodeAddr and NodeHostName, "
            "which it learns from Slurm, and of these names"
        ),
    ] = ()
    node_addresses: Annotated[
        tuple[str, ...], documented("further addresses of single nodes: NODE=ADDRESS or NODE=NAME")
    ] = ()
    controller_addresses: Annotated[
        tuple[str, ...],
        documented(
            "further addresses or names that slurmctld's hooks and vhpc fabric speak from: beside vhpcd's "
            "own host and those of SlurmctldHost"
        ),
    ] = ()
    slurm_adapter: Annotated[
        Literal["scontrol", "pyslurm"],
        documented(
            "how vhpc asks Slurm: by its commands, or by pyslurm where that is of Slurm's own version"
        ),
    ] = "scontrol"
    reconcile_interval_s: Annotated[
        float, documented("how often vhpcd asks Slurm, by one squeue, which jobs there are", ge=0.1, le=3600)
    ] = 60.0
    prolog_stuck_s: Annotated[
        int,
        documented(
            "a job with guests in Reason=Prolog for so many seconds is requeued (sooner when vhpcd knows "
            "that all its Prologs have ended); 0: never. Keep it above PrologEpilogTimeout and "
            "BatchStartTimeout",
            ge=0,
        ),
    ] = 1200
    history_days: Annotated[int, documented("how long leases and timelines of ended jobs are kept", ge=1)] = (
        30
    )


class Images(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Image catalogue and node store."""

    catalog: Annotated[
        str, documented("catalogue folder: names, manifests, blobs; readable by vhpcd and by nodes")
    ] = "/var/lib/vhpc/catalog"
    store: Annotated[str, documented("verified copies on a node, by digest")] = "/var/lib/vhpc/images"


class Guests(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What guests are made of."""

    libvirt_uri: Annotated[str, documented("libvirt connection of the node")] = "qemu:///system"
    accelerator: Annotated[
        Literal["auto", "kvm", "tcg"],
        documented(
            "kvm, tcg (software, slow), or auto: kvm when /dev/kvm opens and the CPU has svm or vmx, else tcg"
        ),
    ] = "auto"
    emulator: Annotated[str, documented("QEMU binary; empty means libvirt's choice")] = ""
    uid_base: Annotated[
        int, documented("first uid of the range that QEMU processes run under, one per guest", ge=1000)
    ] = 700000
    uid_count: Annotated[int, documented("size of that range", ge=1, le=65536)] = 8192
    uid_check_paths: Annotated[
        tuple[str, ...],
        documented(
            "world-writable folders of the node: before a uid of the range is used again, no file in them "
            "may be of it"
        ),
    ] = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108 - looked at, never opened
    qemu_group: Annotated[str, documented("group of QEMU processes: the one that may open /dev/kvm")] = "kvm"
    memory_reserve_mib: Annotated[
        int, documented("memory of a job's allocation on a node that stays outside its guests, in MiB", ge=0)
    ] = 256
    boot_timeout_s: Annotated[
        int, documented("deadline from start of a guest to its agent's ready", ge=1, le=3600)
    ] = 120
    boot_timeout_max_s: Annotated[
        int,
        documented(
            "most that users may ask for by --vhpc-timeout, where that is more than boot_timeout_s; "
            "PrologEpilogTimeout of slurm.conf has to allow it",
            ge=1,
            le=3600,
        ),
    ] = 180
    stage_timeout_s: Annotated[int, documented("deadline of any other single stage", ge=1, le=3600)] = 60
    poweroff_timeout_s: Annotated[
        int, documented("how long a guest may take to power off before it is destroyed", ge=0)
    ] = 5
    cgroups: Annotated[
        Literal["required", "off"],
        documented(
            "required: the guests of a job and their helper processes are in a control group of their own, "
            "with limits, and end with it; off: for a node without cgroups, where Slurm's user can "
            "escape these limits"
        ),
    ] = "required"
    helper_memory_mib: Annotated[
        int,
        documented(
            "memory that the helper processes of a guest (virtiofsd, vhpc-shim) may use, in MiB; the kernel "
            "ends those that want more",
            ge=64,
        ),
    ] = 1024
    qemu_memory_slack_mib: Annotated[
        int,
        documented(
            "memory that QEMU may use beside its guest's own, in MiB, before the kernel ends it", ge=256
        ),
    ] = 2048
    console_limit_kib: Annotated[
        int,
        documented(
            "how much of a guest's console is handed to the user, and kept of its beginning and end",
            ge=1,
            le=1 << 20,
        ),
    ] = 1024

    def longest_boot_s(self, gpus: int) -> int:
        """Most that a user may ask for, in seconds, with so many GPUs in a guest.

        A Prolog that goes on for longer than Slurm allows is killed, and costs its node.
        """
        return max(self.boot_timeout_s, self.boot_timeout_max_s) + gpus * GPU_BOOT_S


class Shares(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Folders of the host that guests see, through virtiofsd run as the job user."""

    virtiofsd: Annotated[str, documented("virtiofsd binary (the Rust one)")] = "/usr/libexec/virtiofsd"
    home: Annotated[bool, documented("share the user's home")] = True
    work_dir: Annotated[
        bool, documented("share the job's working directory where no other share holds it")
    ] = True
    site: Annotated[
        tuple[str, ...], documented("further folders that every guest sees, such as /scratch")
    ] = ()
    read_only: Annotated[tuple[str, ...], documented("those of `site` that guests may only read")] = ()


class Host(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The node itself."""

    sysfs_root: Annotated[str, documented("root of the sysfs tree to read")] = "/sys"
    emulator_cpus: Annotated[
        str, documented("OS CPU list for QEMU's own threads, kept out of Slurm; empty: the job's own CPUs")
    ] = ""
    hugepages: Annotated[
        tuple[str, ...],
        documented(
            "pools of huge pages that vhpc node-setup makes at boot: SIZE:CELL=COUNT, SIZE 2M or 1G, like "
            '"1G:0=64"'
        ),
    ] = ()
    commands: Annotated[
        tuple[str, ...], documented("Slurm commands that work inside guests by running on the host")
    ] = (
        "srun",
        "scontrol",
        "squeue",
        "sinfo",
        "sacct",
        "scancel",
        "sstat",
        "sbcast",
    )


Firmness = Literal["preferred", "strict"]


class Placement(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How an allocation becomes guests: what has to be so (strict), and what only should."""

    cores: Annotated[
        Firmness, documented("strict: an allocation with parts of cores is refused, as the node's fault")
    ] = "preferred"
    memory: Annotated[
        Firmness,
        documented(
            "strict: a job whose memory cannot be bound to the NUMA cells of its CPUs for certain fails"
        ),
    ] = "preferred"
    devices: Annotated[
        Firmness, documented("strict: a job whose GPUs or VFs are at none of its NUMA cells fails")
    ] = "preferred"
    hugepages: Annotated[
        Literal["none", "2M", "1G", "auto"],
        documented(
            "pages of guest memory from the node's pools; auto: the largest that suffice, else ordinary pages"
        ),
    ] = "none"
    rounding: Annotated[
        Firmness,
        documented(
            "preferred: memory that is no multiple of the page is rounded down; strict: such a job fails"
        ),
    ] = "preferred"
    emulator_core: Annotated[
        bool,
        documented(
            "a core of each guest with several is for QEMU's own threads, unless host.emulator_cpus is set"
        ),
    ] = False
    gpu_gres: Annotated[str, documented("Slurm's name of the generic resource that stands for GPUs")] = "gpu"
    gpu_map: Annotated[
        str,
        documented(
            "file with the PCI address of each GPU: lines INDEX ADDRESS [MODULE], in the order of gres.conf"
        ),
    ] = "/etc/vhpc/gpu.map"
    vf_gres: Annotated[
        str, documented("Slurm's name of the count-only one that stands for virtual functions")
    ] = "ibvf"


class Devices(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """PCI functions that are handed to guests."""

    allow: Annotated[
        tuple[str, ...],
        documented(
            'VENDOR:DEVICE ids that may be handed out, like "10de:2330"; empty: what the GPU map names, and '
            "virtual functions of network adapters. A GPU of the map that is named here may be of any class"
        ),
    ] = ()
    reset_methods: Annotated[
        tuple[str, ...],
        documented(
            "the kernel's reset methods that are trusted to clear a device; bus only where all functions "
            "behind the bridge go to the same job"
        ),
    ] = ("device_specific", "flr", "af_flr", "bus")
    timeout_s: Annotated[
        int,
        documented(
            "how long the kernel may take to unbind, bind or reset a device before it is stuck", ge=1, le=600
        ),
    ] = 30
    gpu_scrub: Annotated[
        tuple[str, ...],
        documented(
            "command that clears a GPU's memory after each guest, with an absolute path; {address} is its "
            "PCI address; empty: nvidia_gpu_tools.py of NVIDIA's gpu-admin-tools for NVIDIA's GPUs where it "
            "is installed, else the reset alone"
        ),
    ] = ()
    virtual_functions: Annotated[
        tuple[str, ...],
        documented(
            "how many virtual functions vhpc node-setup makes at boot: PF=COUNT, with the PCI address of the "
            'physical function, like "0000:3b:00.0=8"'
        ),
    ] = ()
    fmpm: Annotated[
        tuple[str, ...],
        documented(
            "command that has the partitions of the node's NVSwitches, with its options: fmpm of NVIDIA's "
            "Fabric-Manager-Client, with an absolute path; empty: there are none to activate. The GPU map "
            "then needs each GPU's module"
        ),
    ] = ()
    scrub_timeout_s: Annotated[int, documented("deadline of that command", ge=1, le=3600)] = 120


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The whole file; one TOML table per section."""

    paths: Paths = Paths()
    controller: Controller = Controller()
    images: Images = Images()
    guests: Guests = Guests()
    shares: Shares = Shares()
    host: Host = Host()
    placement: Placement = Placement()
    devices: Devices = Devices()
    fabric: Fabric = Fabric()


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
        hints = get_type_hints(type(part), include_extras=True)
        for key in part.__struct_fields__:
            meta = next(m for m in get_args(hints[key]) if isinstance(m, msgspec.Meta))
            yield section, key, getattr(part, key), meta.description or ""


def describe_tables() -> Iterator[tuple[str, type[msgspec.Struct], str, Any, str]]:
    """Yield (table, its class, key, default, meaning) for arrays of tables; ``NODEFAULT`` is no default."""
    for table, kind in (("fabric.subnets", Subnet), ("fabric.subnets.managers", Manager)):
        hints = get_type_hints(kind, include_extras=True)
        for one in msgspec.structs.fields(kind):
            meta = next(m for m in get_args(hints[one.name]) if isinstance(m, msgspec.Meta) and m.description)
            yield table, kind, one.name, one.default, meta.description or ""
