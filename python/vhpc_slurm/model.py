# SPDX-License-Identifier: Apache-2.0
"""What all rooms of the package speak: frozen values, no behaviour beyond checks.

Units are in the names: ``_mib`` is MiB (2**20 bytes), ``_s`` seconds.  CPU ids
called ``os_cpu`` are Linux logical CPU numbers (``/sys/devices/system/cpu/cpuN``);
ids called ``abstract`` count as Slurm does: socket by socket, core by core,
thread by thread, whatever numbers the firmware chose.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum

from vhpc_slurm.errors import UserError
from vhpc_slurm.hardware import HostCache, PassthroughDevice, PciController, PciFunction

GENERATION = re.compile(r"^([1-9][0-9]{0,9})\.([0-9]{1,9})\.([0-9a-f]{8})\Z", re.ASCII)
IMAGE_NAME = re.compile(r"^[a-z0-9][a-z0-9._-]{0,63}\Z", re.ASCII)
IMAGE_TAG = re.compile(r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,63}\Z", re.ASCII)
DIGEST = re.compile(r"^sha256:[0-9a-f]{64}\Z", re.ASCII)
MAX_GUESTS_PER_NODE = 64
ALARM = "alarm: "
"""What a node's note begins with that somebody has to hear of although the node is well."""
NODE_NAME = re.compile(r"^[A-Za-z0-9]([A-Za-z0-9.-]{0,62}[A-Za-z0-9])?\Z", re.ASCII)


@dataclass(frozen=True, order=True)
class Generation:
    """One incarnation of a job on our side.

    Every lease, guest, file and process belongs to one; what belongs to
    another generation of the same job is stale by definition.
    """

    job_id: int
    restart: int
    nonce: str

    def __str__(self) -> str:
        return f"{self.job_id}.{self.restart}.{self.nonce}"

    @classmethod
    def parse(cls, text: str) -> Generation:
        """Parse ``JOB.RESTART.NONCE``; ValueError when it is anything else."""
        match = GENERATION.match(text)
        if match is None:
            raise ValueError(f"not a generation: {text!r}")
        return cls(int(match[1]), int(match[2]), match[3])


@dataclass(frozen=True)
class ImageRef:
    """``NAME[:TAG]`` as a user writes it; an absent tag means ``latest``."""

    name: str
    tag: str = "latest"

    def __str__(self) -> str:
        return f"{self.name}:{self.tag}"

    @classmethod
    def parse(cls, text: str) -> ImageRef:
        """Parse ``NAME[:TAG]``; UserError when a name or tag has a character it may not have."""
        name, colon, tag = text.partition(":")
        ref = cls(name, tag if colon else "latest")
        if not IMAGE_NAME.match(ref.name) or not IMAGE_TAG.match(ref.tag):
            raise UserError(
                f"--vhpc-image={text[:80]!r} is no image name",
                "NAME[:TAG] of letters, digits, '.', '_' and '-' is expected",
                "see: vhpc image ls",
            )
        return ref


class BatchPlace(StrEnum):
    """Where the batch script runs; srun tasks run in guests either way."""

    GUEST = "guest"
    HOST = "host"


@dataclass(frozen=True)
class JobRequest:
    """What the user asked for, with the identity Slurm vouches for."""

    job_id: int
    restart: int
    uid: int
    gid: int
    user: str
    work_dir: str
    image: ImageRef
    mem_reserve_mib: int | None = None
    batch: BatchPlace = BatchPlace.GUEST
    timeout_s: int | None = None
    console: str | None = None
    job_name: str = ""
    partition: str = ""
    vfs: int | None = None
    guests_per_node: int = 1


@dataclass(frozen=True)
class GresAllocation:
    """One kind of generic resource on one node; ``indexes`` is empty for count-only GRES."""

    name: str
    type: str
    count: int
    indexes: tuple[int, ...] = ()


@dataclass(frozen=True)
class NodeAllocation:
    """What Slurm gave the job on one node.

    ``cpu_ids`` are Slurm's abstract CPU ids (core * threads + thread), sorted.
    """

    node: str
    cpu_ids: tuple[int, ...]
    memory_mib: int
    gres: tuple[GresAllocation, ...] = ()


@dataclass(frozen=True)
class Allocation:
    """What Slurm gave the job on all its nodes, in Slurm's node order."""

    nodes: tuple[NodeAllocation, ...]

    def on(self, node: str) -> NodeAllocation:
        """The part of one node; KeyError when the job does not have that node."""
        for part in self.nodes:
            if part.node == node:
                return part
        raise KeyError(node)

    def guests(self, per_node: int) -> tuple[str, ...]:
        """Hostnames of all guests, in the order of their ranks: node by node."""
        return tuple(
            guest_hostname(part.node, index, per_node) for part in self.nodes for index in range(per_node)
        )


def guest_hostname(node: str, index: int, per_node: int) -> str:
    """A guest is called as its node is; where it is one of several it says which."""
    return node if per_node == 1 else f"{node}-g{index}"


# --- host -------------------------------------------------------------------


@dataclass(frozen=True, order=True)
class HostCpu:
    """One logical CPU: Linux numbers, and its place in the host's topology."""

    os_cpu: int
    core: int
    socket: int
    cell: int
    online: bool = True


@dataclass(frozen=True)
class HostCell:
    """One NUMA cell; ``hugepages`` maps page size in KiB to (total, free) pages.

    ``gpu`` is the PCI address of the GPU whose memory the cell is, empty for
    the host's own: no guest gets memory of it.
    """

    cell: int
    memory_mib: int
    cpus: tuple[int, ...]
    distances: tuple[tuple[int, int], ...]
    hugepages: tuple[tuple[int, int, int], ...] = ()
    gpu: str = ""


@dataclass(frozen=True)
class HostInventory:
    """A compute node as its kernel describes it.

    ``abstract`` lists OS CPU ids in Slurm's abstract order: entry *i* is the OS
    id of abstract CPU *i*.  ``address_bits`` is how wide the CPU's physical
    addresses are, 0 where that is not known.  ``invariant_tsc``: the CPU's time
    stamp counter runs on in all power states; those of virtual machines seldom do.
    ``remarks`` are lines for people about what could not be read.
    """

    node: str
    cpu_vendor: str
    cpus: tuple[HostCpu, ...]
    cells: tuple[HostCell, ...]
    abstract: tuple[int, ...]
    kvm: bool
    kvm_reason: str
    arch: str = "x86_64"
    caches: tuple[HostCache, ...] = ()
    pci: tuple[PciFunction, ...] = ()
    address_bits: int = 0
    invariant_tsc: bool = True
    remarks: tuple[str, ...] = ()

    @property
    def memory_cells(self) -> tuple[HostCell, ...]:
        """The cells that guests may have memory of: not those of GPUs."""
        return tuple(cell for cell in self.cells if not cell.gpu)

    @property
    def memory_mib(self) -> int:
        """All of the host's own memory."""
        return sum(cell.memory_mib for cell in self.memory_cells)


# --- plan -------------------------------------------------------------------


@dataclass(frozen=True)
class VcpuPin:
    """A vCPU, the one OS CPU it is pinned to, and the guest cell it lies in."""

    vcpu: int
    os_cpu: int
    cell: int


@dataclass(frozen=True)
class GuestCell:
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


@dataclass(frozen=True)
class GuestTopology:
    """SMT topology the guest sees; the product is the number of vCPUs."""

    sockets: int
    dies: int
    cores: int
    threads: int


@dataclass(frozen=True)
class GuestPlan:
    """One guest of a job on a node: which CPUs, which memory, which devices.

    ``pcihole64_gib`` is address space for large BARs, 0 where QEMU's own will
    do; ``address_bits`` how wide physical addresses have to be for it and the
    memory, 0 without devices.
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


@dataclass(frozen=True)
class NodePlan:
    """All guests of one generation on one node; pure data, printable."""

    generation: Generation
    node: str
    guests: tuple[GuestPlan, ...]
    job_memory_mib: int
    reserve_mib: int
    notes: tuple[str, ...] = ()


# --- image ------------------------------------------------------------------


@dataclass(frozen=True)
class Blob:
    """A file of an image: its name within the image, its bytes' digest, its size in bytes."""

    file: str
    sha256: str
    size: int


@dataclass(frozen=True)
class ImageManifest:
    """What an image is.  The image's digest is the sha256 of the manifest's bytes."""

    schema: int
    name: str
    tag: str
    arch: str
    kernel: Blob
    initrd: Blob
    root: Blob
    root_format: str
    init: str
    cmdline: str
    min_memory_mib: int
    firmware: str
    drivers: tuple[str, ...]
    agent_version: str
    description: str = ""
    created: str = ""
    signature: str | None = None


@dataclass(frozen=True)
class ImageIdentity:
    """The one set of bytes that a name meant when the lease was made."""

    ref: ImageRef
    digest: str
    manifest: ImageManifest


# --- lease ------------------------------------------------------------------


class LeaseState(StrEnum):
    """Life of a lease.  READY is written last; REFUSED carries a user's error."""

    RESERVED = "reserved"
    READY = "ready"
    REFUSED = "refused"
    ENDING = "ending"
    RELEASED = "released"


@dataclass(frozen=True)
class NetworkIdentity:
    """The job's own network partition; ``kind`` is ``none`` where there is none.

    With ``ib`` the job's guest number *i*, counted node by node, has the rank ``first_rank``
    + *i*, and ``vfs`` ports on each of ``rails`` rails, whose GUIDs follow from
    these numbers (``fabric.keys.port_guid``), or are in ``port_guids``, a row of
    words for each guest, where nodes do not set them; ``in_guests`` says that these
    reach the guests.  ``site_keys`` are entries that all ports of the job have
    beside its own key and the default one, from partitions of the site's.

    ``addresses`` are (hostname, IPv4 address) of guests on IP over InfiniBand, in a
    network of ``prefix`` bits.

    With ``ethernet`` the Ethernet functions of the guests are on ``vlan``, with
    ``vxlan`` each guest has one virtio interface on ``vni``; their addresses
    follow from these numbers as well (``fabric.keys.mac``).
    """

    kind: str = "none"
    pkey: int | None = None
    vlan: int | None = None
    vni: int | None = None
    addresses: tuple[tuple[str, str], ...] = ()
    first_rank: int = 0
    rails: int = 0
    vfs: int = 0
    port_guids: tuple[tuple[str, ...], ...] = ()
    in_guests: bool = False
    site_keys: tuple[int, ...] = ()
    prefix: int = 0


@dataclass(frozen=True)
class Lease:
    """What a generation holds: decided once, the same for all its nodes."""

    generation: Generation
    state: LeaseState
    request: JobRequest
    allocation: Allocation
    image: ImageIdentity | None
    network: NetworkIdentity = field(default_factory=NetworkIdentity)
    refusal: str = ""


@dataclass(frozen=True)
class Stage:
    """One stage of a boot or a teardown on one node; times are seconds since the epoch."""

    name: str
    began: float
    ended: float
    detail: str = ""


@dataclass(frozen=True)
class Timeline:
    """What happened on one node of a generation, in order."""

    generation: Generation
    node: str
    stages: tuple[Stage, ...]


@dataclass(frozen=True)
class Alarm:
    """What went wrong with a job on a node that is well; ``time`` in seconds since the epoch."""

    job_id: int
    node: str
    time: float
    what: str


@dataclass(frozen=True)
class LeaseRecord:
    """A lease as the controller keeps it and shows it to operators.

    ``taken`` are the nodes that fetched the lease to act on it: only these can
    hold something of it.  ``acknowledged`` are the nodes that said they hold
    nothing, ``unclean`` those that could not, each with its note.
    """

    lease: Lease
    created: float
    updated: float
    acknowledged: tuple[str, ...]
    timelines: tuple[Timeline, ...] = ()
    taken: tuple[str, ...] = ()
    unclean: tuple[tuple[str, str], ...] = ()
