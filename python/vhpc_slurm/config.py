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

from vhpc_slurm.errors import UNDECODABLE, NodeError

DEFAULT_PATH = Path("/etc/vhpc/vhpc.toml")


def _doc(text: str, **limits: Any) -> msgspec.Meta:
    return msgspec.Meta(description=text, **limits)


class Paths(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where vhpc keeps its files."""

    state: Annotated[
        str, _doc("journal, tombstones, timelines, queued acknowledgements; survives a reboot")
    ] = "/var/lib/vhpc"
    run: Annotated[str, _doc("sockets and state files of running jobs; a tmpfs")] = "/run/vhpc"
    log: Annotated[str, _doc("logs of hooks and consoles of guests")] = "/var/log/vhpc"
    libexec: Annotated[str, _doc("vhpc-shim, vhpc-run and the hooks")] = "/usr/libexec/vhpc"


class Controller(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """vhpcd, the controller service."""

    host: Annotated[str, _doc("host name or address that nodes reach vhpcd at")] = "localhost"
    listen: Annotated[str, _doc("address that vhpcd listens on")] = "0.0.0.0"  # noqa: S104 - nodes must reach it; munge decides who is heard
    port: Annotated[int, _doc("TCP port of vhpcd", ge=1, le=65535)] = 7633
    user: Annotated[str, _doc("user that vhpcd runs as; clients accept answers of no other")] = "vhpc"
    slurm_user: Annotated[
        str, _doc("SlurmUser of slurm.conf: beside root the only user vhpcd listens to")
    ] = "slurm"
    database: Annotated[str, _doc("SQLite file of the leases")] = "/var/lib/vhpc/vhpcd/leases.sqlite"
    munge_socket: Annotated[str, _doc("munged's socket; empty means munge's own default")] = ""
    request_timeout_s: Annotated[
        int,
        _doc(
            "longest wait for an answer of vhpcd; a job's key has to be on the fabric a second sooner",
            ge=1,
            le=600,
        ),
    ] = 10
    lease_wait_s: Annotated[int, _doc("longest wait of a node for a lease to become READY", ge=1, le=600)] = (
        60
    )
    slurm_bin: Annotated[str, _doc("folder of scontrol, squeue and scancel")] = "/usr/bin"
    slurm_conf: Annotated[str, _doc("slurm.conf for these commands; empty means Slurm's own default")] = ""
    slurm_adapter: Annotated[
        Literal["scontrol", "pyslurm"],
        _doc("how vhpc asks Slurm: by its commands, or by pyslurm where that is of Slurm's own version"),
    ] = "scontrol"
    reconcile_interval_s: Annotated[
        float, _doc("how often vhpcd asks Slurm, by one squeue, which jobs there are", ge=0.1, le=3600)
    ] = 60.0
    prolog_stuck_s: Annotated[
        int,
        _doc(
            "a job with guests in Reason=Prolog for so many seconds is requeued (sooner when vhpcd knows "
            "that all its Prologs have ended); 0: never. Keep it above PrologEpilogTimeout and "
            "BatchStartTimeout",
            ge=0,
        ),
    ] = 1200
    history_days: Annotated[int, _doc("how long leases and timelines of ended jobs are kept", ge=1)] = 30


class Images(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Image catalogue and node store."""

    catalog: Annotated[
        str, _doc("catalogue folder: names, manifests, blobs; readable by vhpcd and by nodes")
    ] = "/var/lib/vhpc/catalog"
    store: Annotated[str, _doc("verified copies on a node, by digest")] = "/var/lib/vhpc/images"


class Guests(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What guests are made of."""

    libvirt_uri: Annotated[str, _doc("libvirt connection of the node")] = "qemu:///system"
    accelerator: Annotated[
        Literal["auto", "kvm", "tcg"],
        _doc(
            "kvm, tcg (software, slow), or auto: kvm when /dev/kvm opens and the CPU has svm or vmx, else tcg"
        ),
    ] = "auto"
    emulator: Annotated[str, _doc("QEMU binary; empty means libvirt's choice")] = ""
    uid_base: Annotated[
        int, _doc("first uid of the range that QEMU processes run under, one per guest", ge=1000)
    ] = 700000
    uid_count: Annotated[int, _doc("size of that range", ge=1, le=65536)] = 1024
    qemu_group: Annotated[str, _doc("group of QEMU processes: the one that may open /dev/kvm")] = "kvm"
    memory_reserve_mib: Annotated[
        int, _doc("memory of a job's allocation on a node that stays outside its guests, in MiB", ge=0)
    ] = 256
    boot_timeout_s: Annotated[
        int, _doc("deadline from start of a guest to its agent's ready", ge=1, le=3600)
    ] = 120
    stage_timeout_s: Annotated[int, _doc("deadline of any other single stage", ge=1, le=3600)] = 60
    poweroff_timeout_s: Annotated[
        int, _doc("how long a guest may take to power off before it is destroyed", ge=0)
    ] = 5
    console_limit_kib: Annotated[
        int,
        _doc(
            "how much of a guest's console is handed to the user, and kept of its beginning and end",
            ge=1,
            le=1 << 20,
        ),
    ] = 1024


class Shares(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Folders of the host that guests see, through virtiofsd run as the job user."""

    virtiofsd: Annotated[str, _doc("virtiofsd binary (the Rust one)")] = "/usr/libexec/virtiofsd"
    home: Annotated[bool, _doc("share the user's home")] = True
    work_dir: Annotated[bool, _doc("share the job's working directory where no other share holds it")] = True
    site: Annotated[tuple[str, ...], _doc("further folders that every guest sees, such as /scratch")] = ()
    read_only: Annotated[tuple[str, ...], _doc("those of `site` that guests may only read")] = ()


class Host(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The node itself."""

    sysfs_root: Annotated[str, _doc("root of the sysfs tree to read")] = "/sys"
    emulator_cpus: Annotated[
        str, _doc("OS CPU list for QEMU's own threads, kept out of Slurm; empty: the job's own CPUs")
    ] = ""
    hugepages: Annotated[
        tuple[str, ...],
        _doc(
            "pools of huge pages that vhpc node-setup makes at boot: SIZE:CELL=COUNT, SIZE 2M or 1G, like "
            '"1G:0=64"'
        ),
    ] = ()
    commands: Annotated[
        tuple[str, ...], _doc("Slurm commands that work inside guests by running on the host")
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
        Firmness, _doc("strict: an allocation with parts of cores is refused, as the node's fault")
    ] = "preferred"
    memory: Annotated[
        Firmness,
        _doc("strict: a job whose memory cannot be bound to the NUMA cells of its CPUs for certain fails"),
    ] = "preferred"
    devices: Annotated[
        Firmness, _doc("strict: a job whose GPUs or VFs are at none of its NUMA cells fails")
    ] = "preferred"
    hugepages: Annotated[
        Literal["none", "2M", "1G", "auto"],
        _doc(
            "pages of guest memory from the node's pools; auto: the largest that suffice, else ordinary pages"
        ),
    ] = "none"
    rounding: Annotated[
        Firmness,
        _doc("preferred: memory that is no multiple of the page is rounded down; strict: such a job fails"),
    ] = "preferred"
    emulator_core: Annotated[
        bool,
        _doc("a core of each guest with several is for QEMU's own threads, unless host.emulator_cpus is set"),
    ] = False
    gpu_gres: Annotated[str, _doc("Slurm's name of the generic resource that stands for GPUs")] = "gpu"
    gpu_map: Annotated[
        str,
        _doc(
            "file with the PCI address of each GPU: lines INDEX ADDRESS [MODULE], in the order of gres.conf"
        ),
    ] = "/etc/vhpc/gpu.map"
    vf_gres: Annotated[str, _doc("Slurm's name of the count-only one that stands for virtual functions")] = (
        "ibvf"
    )


class Devices(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """PCI functions that are handed to guests."""

    allow: Annotated[
        tuple[str, ...],
        _doc(
            'VENDOR:DEVICE ids that may be handed out, like "10de:2330"; empty: what the GPU map names, and '
            "virtual functions of network adapters. A GPU of the map that is named here may be of any class"
        ),
    ] = ()
    reset_methods: Annotated[
        tuple[str, ...],
        _doc(
            "the kernel's reset methods that are trusted to clear a device; bus only where all functions "
            "behind the bridge go to the same job"
        ),
    ] = ("device_specific", "flr", "af_flr", "bus")
    timeout_s: Annotated[
        int,
        _doc(
            "how long the kernel may take to unbind, bind or reset a device before it is stuck", ge=1, le=600
        ),
    ] = 30
    gpu_scrub: Annotated[
        tuple[str, ...],
        _doc(
            "command that clears a GPU's memory after each guest, with an absolute path; {address} is its "
            "PCI address; empty: nvidia_gpu_tools.py of NVIDIA's gpu-admin-tools for NVIDIA's GPUs where it "
            "is installed, else the reset alone"
        ),
    ] = ()
    virtual_functions: Annotated[
        tuple[str, ...],
        _doc(
            "how many virtual functions vhpc node-setup makes at boot: PF=COUNT, with the PCI address of the "
            'physical function, like "0000:3b:00.0=8"'
        ),
    ] = ()
    fmpm: Annotated[
        tuple[str, ...],
        _doc(
            "command that has the partitions of the node's NVSwitches, with its options: fmpm of NVIDIA's "
            "Fabric-Manager-Client, with an absolute path; empty: there are none to activate. The GPU map "
            "then needs each GPU's module"
        ),
    ] = ()
    scrub_timeout_s: Annotated[int, _doc("deadline of that command", ge=1, le=3600)] = 120


class Manager(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One OpenSM of a subnet: its three files on vhpcd's host, or a command that reaches its host."""

    partitions: Annotated[str, _doc("its partitions file, as fabric.partitions")] = ""
    pidfile: Annotated[str, _doc("its pidfile, as fabric.opensm_pidfile")] = ""
    log: Annotated[str, _doc("its log, as fabric.opensm_log")] = ""
    command: Annotated[
        tuple[str, ...],
        _doc(
            "in place of these: a command, run without a shell, that runs `vhpc fabric manager` on its host"
        ),
    ] = ()


class Subnet(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One subnet of several, or one with an OpenSM that stands by; keys are the same in all."""

    device: Annotated[str, _doc("adapter that this subnet is read through; empty: the first")] = ""
    device_port: Annotated[int, _doc("port of it; 0: the first that is up", ge=0, le=254)] = 0
    managers: Annotated[
        tuple[Manager, ...],
        _doc("its OpenSM, master and those that stand by; all have the new file before one reads it"),
        msgspec.Meta(min_length=1),
    ]


class Fabric(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The job's own partition of a fabric: a partition key, a VLAN or a VNI."""

    backend: Annotated[
        Literal["none", "opensm-file", "static-pool", "ufm-rest", "ethernet", "vxlan"],
        _doc(
            "who applies partition keys: none (guests have no fabric), opensm-file (vhpcd writes OpenSM's "
            "partitions file for each job), static-pool (all keys are declared once, by vhpc fabric render "
            "--pool), ufm-rest (vhpcd asks NVIDIA UFM for each job), ethernet (a VLAN for each job, which "
            "nodes set on its Ethernet functions), vxlan (a VNI for each job, which nodes do not apply yet)"
        ),
    ] = "none"
    key_owner: Annotated[Literal["job", "user"], _doc("who has a key: each job, or each user")] = "job"
    pkey_first: Annotated[int, _doc("first partition key of the pool", ge=0x0001, le=0x7FFE)] = 0x1000
    pkey_last: Annotated[
        int, _doc("last partition key of the pool; 0x7fff is the default partition", ge=0x0001, le=0x7FFE)
    ] = 0x7FEF
    pkey_reserved: Annotated[tuple[int, ...], _doc("keys in that range that are never handed out")] = ()
    vlan_first: Annotated[int, _doc("ethernet: first VLAN of the pool", ge=2, le=4094)] = 2000
    vlan_last: Annotated[int, _doc("ethernet: last VLAN of the pool", ge=2, le=4094)] = 2999
    vlan_reserved: Annotated[tuple[int, ...], _doc("VLANs in that range that are never handed out")] = ()
    vni_first: Annotated[int, _doc("vxlan: first VNI of the pool", ge=1, le=0xFFFFFF)] = 100000
    vni_last: Annotated[int, _doc("vxlan: last VNI of the pool", ge=1, le=0xFFFFFF)] = 104095
    vni_reserved: Annotated[tuple[int, ...], _doc("VNIs in that range that are never handed out")] = ()
    exhausted: Annotated[
        Literal["requeue", "refuse"],
        _doc(
            "what becomes of a job for which no key is free: requeue (Slurm starts it again later; a license "
            "as large as the pool lets it wait in the queue instead), or refuse (it fails, and says why)"
        ),
    ] = "requeue"
    rails: Annotated[int, _doc("ports of different subnets or switches that a guest has", ge=1, le=256)] = 1
    vfs: Annotated[int, _doc("virtual functions of a guest on each rail", ge=1, le=256)] = 1
    quarantine_s: Annotated[
        int, _doc("how long a key rests after it was stripped, while vhpcd runs", ge=0, le=86400)
    ] = 60
    ipoib: Annotated[bool, _doc("make an IPoIB group for each key; costs a multicast LID")] = True
    partitions: Annotated[str, _doc("OpenSM's partitions file, which vhpcd alone writes")] = (
        "/etc/opensm/partitions.conf"
    )
    site_partitions: Annotated[
        str, _doc("file with partitions of the site's own, added to each that vhpcd writes; empty: none")
    ] = ""
    opensm_pidfile: Annotated[str, _doc("file with OpenSM's process id")] = "/run/opensm.pid"
    opensm_log: Annotated[str, _doc("OpenSM's log; OpenSM needs force_log_flush TRUE")] = (
        "/var/log/opensm.log"
    )
    apply_timeout_s: Annotated[
        int, _doc("deadline for OpenSM or UFM to do it, and for the fabric to show it", ge=1, le=300)
    ] = 10
    sweep_interval_s: Annotated[
        float,
        _doc(
            "least time between two changes of the fabric; jobs that start or end meanwhile share the next",
            ge=0,
            le=60,
        ),
    ] = 2.0
    audit_interval_s: Annotated[
        float, _doc("how often the whole fabric is compared with the keys in use", gt=0, le=300)
    ] = 15.0
    open_deadline_s: Annotated[
        int,
        _doc(
            "an open fabric (ports can talk that should not) is put right at once; where that does not work "
            "for so long, no lease with a key is handed out, and nodes end guests that have one",
            ge=0,
            le=3600,
        ),
    ] = 60
    lost_after_s: Annotated[
        int,
        _doc(
            "a node that has not acknowledged the end of a job for so long may still run its guests: the key "
            "is taken off the fabric and stays out of use until the node says so, or is fenced",
            ge=1,
            le=86400,
        ),
    ] = 900
    max_lost_percent: Annotated[
        int,
        _doc(
            "vhpcd writes no file that drops more than so many of a hundred keys which it does not know to "
            "have ended: its database is not the one that wrote them",
            ge=0,
            le=100,
        ),
    ] = 0
    device: Annotated[str, _doc("adapter that the fabric is read through; empty: the first")] = ""
    device_port: Annotated[int, _doc("port of it; 0: the first that is up", ge=0, le=254)] = 0
    subnets: Annotated[
        tuple[Subnet, ...],
        _doc(
            "opensm-file with several subnets or several OpenSM; empty: one subnet with one OpenSM, as "
            "`partitions`, `opensm_pidfile`, `opensm_log` and `device` say"
        ),
    ] = ()
    port_map: Annotated[
        str,
        _doc(
            "opensm-file: file with the ports that nodes have, where their GUIDs are fixed (whole adapters): "
            "lines NODE RAIL 0xGUID, read when vhpcd starts; empty: nodes give their virtual functions GUIDs "
            "that follow from the key"
        ),
    ] = ""
    in_guests: Annotated[
        bool,
        _doc(
            "the ports of port_map reach the guests, by the site's own means: a job starts only when each of "
            "its guests shows them active with exactly its keys, as it does for virtual functions in any case"
        ),
    ] = False
    ipoib_network: Annotated[
        str,
        _doc(
            "IPv4 network such as 10.128.0.0/12, of which each guest with InfiniBand ports gets an address "
            "on its job's key; the names of the job's nodes then lead there in its guests; empty: none"
        ),
    ] = ""
    guest_timeout_s: Annotated[
        int, _doc("how long a guest may wait for its ports to be active with its keys", ge=1, le=600)
    ] = 30
    pool_guests: Annotated[
        int,
        _doc("static-pool: guests that each key is declared for; larger jobs are refused", ge=1, le=65536),
    ] = 64
    ufm_url: Annotated[str, _doc("ufm-rest: UFM's address, https://HOST[:PORT]")] = ""
    ufm_token_file: Annotated[
        str,
        _doc("ufm-rest: file with an access token of UFM, for vhpcd's user only; read at each request"),
    ] = "/etc/vhpc/ufm.token"  # noqa: S105 - the name of a file
    ufm_ca: Annotated[
        str, _doc("ufm-rest: certificates (PEM) that UFM's is checked against; empty: those of the system")
    ] = ""
    ufm_request_timeout_s: Annotated[
        int, _doc("ufm-rest: deadline of one request; that of a change is apply_timeout_s", ge=1, le=300)
    ] = 5
    ufm_proof: Annotated[
        Literal["fabric", "ufm"],
        _doc(
            "ufm-rest: what proves that a key is applied: fabric (UFM says so, and the tables of the ports "
            "that can be read through `device`), or ufm (its word only: vhpcd's host has no port)"
        ),
    ] = "fabric"
    ufm_mark_pkey: Annotated[
        int,
        _doc(
            "ufm-rest: key outside of the pool whose one member says which database changed UFM last",
            ge=0x0001,
            le=0x7FFE,
        ),
    ] = 0x0FFF


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
