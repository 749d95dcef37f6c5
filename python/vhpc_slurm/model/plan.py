# SPDX-License-Identifier: Apache-2.0
"""The plan of a node, and what its boot adds to it.

A plan does not change after its reservation: ``vhpc plan`` prints the value that Prolog boots.
"""

from __future__ import annotations

from enum import StrEnum

from vhpc_slurm.device import PassthroughDevice
from vhpc_slurm.hardware import PciController
from vhpc_slurm.model.job import Generation
from vhpc_slurm.record import Record


class VcpuPin(Record, frozen=True):
    """A vCPU, the one OS CPU it is pinned to, and the guest cell it lies in."""

    vcpu: int
    os_cpu: int
    cell: int


class GuestCell(Record, frozen=True):
    """A NUMA cell of the guest and the host cell that its vCPUs run in.

    ``nodeset`` lists all host cells its memory may come from, where that is
    more than ``host_cell`` alone; ``distances`` holds (guest cell, distance)
    pairs in the ACPI scale, where 10 is local.
    """

    cell: int
    vcpus: tuple[int, ...]
    memory_mib: int
    host_cell: int
    distances: tuple[tuple[int, int], ...] = ()
    nodeset: tuple[int, ...] = ()


class MemoryBinding(StrEnum):
    """How guest memory is held to its host cells; ``NONE`` leaves it to first touch by pinned vCPUs."""

    STRICT = "strict"
    PREFERRED = "preferred"
    NONE = "none"


class GuestTopology(Record, frozen=True):
    """The CPU topology that the guest sees; the product is the number of vCPUs.

    ``cores`` are those of a cluster; x86-64 hosts, and others without clusters, have one in each socket.
    """

    sockets: int
    clusters: int
    cores: int
    threads: int


class Share(Record, frozen=True):
    """A folder of the host, mounted in the guest at the same path.

    ``tag`` is what the guest mounts it by, ``why`` is ``home``, ``workdir`` or ``site``,
    ``cache`` is virtiofsd's policy: ``auto``, ``always`` or ``never``; ``locks`` says where a lock on its
    files holds: ``cluster`` (on all hosts), ``guest`` (in one guest), or ``refuse`` (nowhere).
    ``snapshot`` is a file with an EROFS that a guest mounts instead; the boot finds it out, a plan has none.
    """

    tag: str
    path: str
    read_only: bool
    why: str
    cache: str = "auto"
    locks: str = "cluster"
    snapshot: str = ""

    @property
    def needs_lock_daemon(self) -> bool:
        """Whether a lock daemon serves it: its locks hold on all hosts, or are refused."""
        return self.locks != "guest"


class GuestPaths(Record, frozen=True):
    """Files of one guest on the host, absolute; ``node.store.layout`` makes them.

    Attributes:
        run_dir: the guest's run folder.
        kernel, initrd: private copies, which exist until QEMU has read them.
        root: raw image of the root file system; shared by all guests of the image.
        agent_socket: socket that QEMU listens on for the agent's port.
        console_log: the guest's serial console.
        disk: its own disk, a raw file; empty if the job has asked for none.
    """

    run_dir: str = ""
    kernel: str = ""
    initrd: str = ""
    root: str = ""
    agent_socket: str = ""
    console_log: str = ""
    disk: str = ""

    @property
    def nat_socket(self) -> str:
        """Socket of the guest's passt, in a directory of its own."""
        return f"{self.run_dir}/nat/socket"

    @property
    def locks_socket(self) -> str:
        """Socket of the lock daemon of the shared folders."""
        return f"{self.run_dir}/locks.sock"

    def share_socket(self, tag: str) -> str:
        """Socket of the daemon that serves a share."""
        return f"{self.run_dir}/fs-{tag}.sock"


class GuestInterface(Record, frozen=True):
    """A guest's interface on the network of its job.

    Attributes:
        tap: name of the node's end.
        mac: of the guest's end.
        queues: pairs of virtio queues.
        ipv4, ipv6: addresses with prefixes, such as ``10.200.0.1/16``.
    """

    tap: str
    mac: str
    queues: int
    ipv4: str
    ipv6: str


class NatInterface(Record, frozen=True):
    """A guest's interface that leads to other networks through passt; IPv4 only.

    Attributes:
        mac: of the guest's end; the same in all guests, since each one is alone with its passt.
        ipv4: address with prefix, such as ``10.201.0.2/24``.
        gateway: address of the default route.
        mtu: of the guest's end.
        dns: addresses of DNS servers; empty if the node has none that guests can reach.
    """

    mac: str
    ipv4: str
    gateway: str
    mtu: int
    dns: tuple[str, ...] = ()


class Tunnel(Record, frozen=True):
    """A node's WireGuard interface, through which the frames of one segment go to the job's other nodes.

    Attributes:
        name: of the interface.
        port: UDP port that it listens on, the same on all nodes of the job.
        address: IPv6 address of this node inside the tunnels.
    """

    name: str
    port: int
    address: str


class SiteInterface(Record, frozen=True):
    """A guest's interface on the bridge of the site; IPv4 only.

    Attributes:
        bridge: of the site, on the node.
        queues: pairs of virtio queues.
        gateway: address of the default route.
        dns: addresses of DNS servers; empty: the guest keeps those of its image.
    """

    bridge: str
    queues: int
    gateway: str
    dns: tuple[str, ...] = ()


class SitePort(Record, frozen=True):
    """A guest's port of the bridge of the site; the guest gets it just before it starts.

    Attributes:
        tap: name of the node's end.
        mac: of the guest's end.
        ipv4: of the guest's end, with prefix; its packet filter needs no prefix.
        mtu: of the bridge; its packet filter needs none.
    """

    tap: str
    mac: str
    ipv4: str
    mtu: int = 0


class NodeSegment(Record, frozen=True):
    """The part of a job's network on one node.

    Attributes:
        vni: VXLAN network identifier.
        port: UDP port of VXLAN.
        local: underlay address of this node.
        bridge, vxlan: names of the interfaces.
        tunnel: None if the segment is not encrypted, or the job has no other nodes.
        flood: broadcast and multicast frames go to the other nodes too.
        mtu: of the guests' interfaces; 0: as large as the underlay permits.
    """

    vni: int
    port: int
    local: str
    bridge: str
    vxlan: str
    tunnel: Tunnel | None = None
    flood: bool = False
    mtu: int = 0


class GuestPlan(Record, frozen=True):
    """One guest of a job on a node: which CPUs, which memory, which devices.

    Placement (``placement.plan``) decides all but the last seven attributes, which
    follow from the lease and the node (``node.plan``).

    Attributes:
        pcihole64_gib: address space for large BARs; 0 if QEMU's default is enough.
        address_bits: width of physical addresses that the memory and these BARs need; 0 without devices.
        start_timeout_s: longest start of QEMU.
        boot_timeout_s: longest time from the start to the agent's hello.
        nccl_topology: XML file for NCCL; empty if the guest sees the host's PCI topology by itself.
        port_guids: InfiniBand ports that the guest must show before it is ready, rail by rail.
        paths: its files on the host.
        interface: on the network of the job; None where the job has none.
        nat: to other networks; None where the job has no nat.
        site: on the bridge of the site; None where the job is not on it.
        disk_mib: size of its own disk; 0 if the job has asked for none.
        disk_mount: directory at which it is mounted; empty: it takes the changes to the root.
    """

    index: int
    hostname: str
    pins: tuple[VcpuPin, ...]
    topology: GuestTopology
    cells: tuple[GuestCell, ...]
    memory_mib: int
    emulator_cpus: tuple[int, ...]
    emulator_choice: str
    hugepage_kib: int = 0
    memory_binding: MemoryBinding = MemoryBinding.NONE
    devices: tuple[PassthroughDevice, ...] = ()
    controllers: tuple[PciController, ...] = ()
    pcihole64_gib: int = 0
    address_bits: int = 0
    start_timeout_s: int = 0
    boot_timeout_s: int = 0
    nccl_topology: str = ""
    port_guids: tuple[int, ...] = ()
    paths: GuestPaths = GuestPaths()
    interface: GuestInterface | None = None
    nat: NatInterface | None = None
    site: SiteInterface | None = None
    disk_mib: int = 0
    disk_mount: str = ""


class NodePlan(Record, frozen=True):
    """All guests of one generation on one node; pure data, printable, never changed.

    Attributes:
        job_memory_mib: memory that Slurm gave the job here.
        reserve_mib: how much of it stays outside of guests.
        notes: lines for people.
        shares: folders of the host that the guests see; one that the user cannot enter is left out at start.
        segment: of the network of the job; None where the job has none.
        partition: libvirt's name of the control group of the guests; empty for libvirt's default.
    """

    generation: Generation
    node: str
    guests: tuple[GuestPlan, ...]
    job_memory_mib: int
    reserve_mib: int
    notes: tuple[str, ...] = ()
    shares: tuple[Share, ...] = ()
    partition: str = ""
    segment: NodeSegment | None = None


class RunningGuest(Record, frozen=True):
    """A guest that runs: its plan, and what was found out or made just before its start.

    Attributes:
        uid: that its QEMU runs as.
        shares: of the plan's folders, those that the job's user can enter.
        mtu: of its interface on the network of the job; 0 if it is not known.
        site_port: on the bridge of the site; None if it has none.
    """

    plan: GuestPlan
    uid: int
    shares: tuple[Share, ...] = ()
    mtu: int = 0
    site_port: SitePort | None = None

    @property
    def has_locks(self) -> bool:
        """Whether it has a lock daemon."""
        return any(share.needs_lock_daemon for share in self.shares)


class RunningNode(Record, frozen=True):
    """The guests of a node that run, the plan that they were started by, and lines for the job's report."""

    plan: NodePlan
    guests: tuple[RunningGuest, ...]
    notes: tuple[str, ...] = ()
