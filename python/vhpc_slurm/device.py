# SPDX-License-Identifier: Apache-2.0
"""Devices for guests: each has a key and a class.

The key is the device's name in plans, reservations, journals and quarantine,
and for operators.  The class has two parts, joined by its name: the traits
here, which placement and the domain XML use, and the verbs on a node
(``node.devices.device_class``).  docs/architecture.md says how to add a class.
"""

from __future__ import annotations

import re

from vhpc_slurm.errors import NodeError
from vhpc_slurm.hardware import PCI_ADDRESS, PciBar, PciFunction, address_key
from vhpc_slurm.record import Record

GPU_CLASSES = frozenset((0x03, 0x0B, 0x12))  # display controllers, co-processors, accelerators
DISPLAY_OF_SERVERS = frozenset((0x1A03, 0x102B))  # ASPEED, Matrox: consoles of management controllers
NETWORK_CLASS = 0x02
INFINIBAND_ON_SERIAL_BUS = 0x0C06
NVIDIA = 0x10DE
MDEV_KEY = re.compile(r"76687063-0000-8([0-9a-f]{3})-8000-([0-9a-f]{8})([0-9a-f]{2})([0-9a-f]{2})", re.ASCII)
"""An mdev's UUID, version 8 of RFC 9562: "vhpc", the mdev's number, domain, bus and devfn of its parent."""


class HostdevSource(Record, frozen=True):
    """A device in libvirt's terms; the source's address has these attributes."""

    kind: str
    attributes: tuple[tuple[str, str], ...]
    address: tuple[tuple[str, str], ...]


class DeviceTraits:
    """The properties that all devices of a class share, on every host.

    Attributes:
        name: of the class; at most 16 characters.
        key_form: form of the keys, of at most 64 characters; ``key_name`` is its name in messages.
        indexed: Slurm allocates them by index (``placement.gpu_gres``, and a line of the GPU map for
            each); otherwise by number (``placement.vf_gres``), and one can replace another.
        iommu: without an IOMMU group of its place, a guest could write to the host's memory with it.
        networked: it has a network identity from the lease.
        nvswitch: an NVSwitch of the node joins it with the guest's other ones.
        nccl: NCCL must know its place.
        slow_boot: a guest kernel needs ``GPU_BOOT_S`` more to set up its BARs.
    """

    name: str
    key_form = PCI_ADDRESS
    key_name = "PCI address"
    indexed = False
    iommu = True
    networked = False
    nvswitch = False
    nccl = False
    slow_boot = False

    def owns(self, key: str, place: PciFunction, *, allowed: bool) -> bool:
        """Whether a device is of this class.

        Args:
            key: of the device.
            place: the PCI function that it is, or that has it.
            allowed: ``devices.allow`` lists the ids of the place.
        """
        raise NotImplementedError

    def plausible(self, place: PciFunction) -> bool:  # noqa: ARG002 - for other classes
        """Whether the place alone shows that guests may have the device, without ``devices.allow``."""
        return True

    def bars(self, place: PciFunction) -> tuple[PciBar, ...]:
        """The BARs that the guest sees."""
        return place.bars

    def source(self, key: str) -> HostdevSource:
        """The device in the domain XML.

        ``managed="no"``: binding to vfio-pci and back is ours, with a journal.
        """
        domain, bus, slot, function = address_key(key)
        address = {
            "domain": f"0x{domain:04x}",
            "bus": f"0x{bus:02x}",
            "slot": f"0x{slot:02x}",
            "function": f"0x{function:x}",
        }
        return HostdevSource("pci", (("managed", "no"),), tuple(address.items()))


class GpuTraits(DeviceTraits):
    """A GPU, or another PCI function that the site allows and lists in the GPU map."""

    name = "gpu"
    indexed = nvswitch = nccl = slow_boot = True

    def owns(self, key: str, place: PciFunction, *, allowed: bool) -> bool:
        """Any function with the class of a GPU, or that the site allows."""
        return key == place.address and (allowed or place.class_code >> 16 in GPU_CLASSES)

    def plausible(self, place: PciFunction) -> bool:
        """Not a management controller.  Virtual functions of AMD's and Intel's GPUs are GPUs of their own."""
        return place.vendor not in DISPLAY_OF_SERVERS


class VirtualFunctionTraits(DeviceTraits):
    """A virtual function of a network adapter."""

    name = "vf"
    networked = nccl = True

    def owns(self, key: str, place: PciFunction, *, allowed: bool) -> bool:  # noqa: ARG002 - any kind may
        """Any virtual function of a network adapter."""
        network = place.class_code >> 16 == NETWORK_CLASS or place.class_code >> 8 == INFINIBAND_ON_SERIAL_BUS
        return key == place.address and bool(place.physfn) and network


class MdevTraits(DeviceTraits):
    """A mediated device (mdev); it exists while a job has it.

    It has no IOMMU group of its parent: the parent's driver decides which memory it reaches.
    Its BARs depend on its type; they are at most those of its parent.
    """

    name = "mdev"
    key_form = MDEV_KEY
    key_name = "mdev's UUID"
    indexed = True
    iommu = False

    def owns(self, key: str, place: PciFunction, *, allowed: bool) -> bool:  # noqa: ARG002 - its type is named
        """Any mdev of the function."""
        return MDEV_KEY.fullmatch(key) is not None and mdev_parent(key) == place.address

    def source(self, key: str) -> HostdevSource:
        """By its UUID."""
        return HostdevSource("mdev", (("model", "vfio-pci"),), (("uuid", key),))


class VgpuTraits(DeviceTraits):
    """A virtual function of an NVIDIA GPU: it stays with its driver, which makes it a vGPU of some type."""

    name = "vgpu"
    indexed = True

    def owns(self, key: str, place: PciFunction, *, allowed: bool) -> bool:  # noqa: ARG002 - its type is named
        """Any virtual function of an NVIDIA GPU."""
        nvidia_gpu = place.vendor == NVIDIA and place.class_code >> 16 in GPU_CLASSES
        return key == place.address and bool(place.physfn) and nvidia_gpu


def mdev_key(parent: str, number: int) -> str:
    """The UUID of the n-th mdev of a PCI function, known before it is created; ``number`` is below 4096."""
    domain, bus, slot, function = address_key(parent)
    return f"76687063-0000-8{number:03x}-8000-{domain:08x}{bus:02x}{slot << 3 | function:02x}"


def mdev_parent(key: str) -> str:
    """Address of the PCI function whose mdev has this key; NodeError if it is not the key of an mdev."""
    match = MDEV_KEY.fullmatch(key)
    if match is None:
        raise NodeError(f"{key!r} is not the key of a mediated device")
    domain, bus, devfn = (int(part, 16) for part in match.groups()[1:])
    return f"{domain:04x}:{bus:02x}:{devfn >> 3:02x}.{devfn & 7}"


TRAITS: list[DeviceTraits] = [MdevTraits(), VgpuTraits(), GpuTraits(), VirtualFunctionTraits()]
"""Of all classes; the first one that owns a device is its class."""


def traits_of(name: str) -> DeviceTraits:
    """The traits of a class by its name; NodeError if this version has no such class."""
    for traits in TRAITS:
        if traits.name == name:
            return traits
    raise NodeError(f"this version has no device class {name!r}", "a newer vhpc has written it")


def is_key(text: str) -> bool:
    """Whether a text has the form of a key of some class."""
    return any(traits.key_form.fullmatch(text) for traits in TRAITS)


def key_order(key: str) -> tuple[int, str]:
    """For sorting keys: PCI addresses by domain, bus, slot and function, then longer keys."""
    return len(key), key


class HostDevice(Record, frozen=True):
    """A device of a host that guests may get.

    Attributes:
        key: of the device.
        device_class: name of its class.
        place: the PCI function that it is, or that has it: its place in the host's topology.
    """

    key: str
    device_class: str
    place: PciFunction

    @property
    def traits(self) -> DeviceTraits:
        """Of its class."""
        return traits_of(self.device_class)

    @property
    def bars(self) -> tuple[PciBar, ...]:
        """The BARs that the guest sees."""
        return self.traits.bars(self.place)


def classify(key: str, place: PciFunction, *, indexed: bool, allowed: bool = False) -> HostDevice | None:
    """A device with its class, of those that Slurm allocates by index or by number; None if it has none."""
    for traits in TRAITS:
        if traits.indexed == indexed and traits.owns(key, place, allowed=allowed):
            return HostDevice(key, traits.name, place)
    return None


class NodeDevices(Record, frozen=True):
    """Which devices of a node may go to guests, besides its virtual functions.

    Attributes:
        gpus: keys by GRES index.
        quarantined: keys of devices that may not, whatever else says so.
        parents: (key, address of the PCI function that has it) of devices that are not PCI functions.
    """

    gpus: tuple[str, ...] = ()
    quarantined: tuple[str, ...] = ()
    parents: tuple[tuple[str, str], ...] = ()


class VfIdentity(Record, frozen=True):
    """The identity of a virtual function on its network.

    Attributes:
        node_guid, port_guid: of InfiniBand.
        pkey: partition key of InfiniBand, without membership.
        mac: of Ethernet: six bytes.
        vlan: of Ethernet; 0 for none.
    """

    node_guid: int = 0
    port_guid: int = 0
    pkey: int = 0
    mac: bytes = b""
    vlan: int = 0


class PassthroughDevice(Record, frozen=True):
    """A device of the host that is handed to a guest.

    Attributes:
        key: of the device.
        device_class: name of its class.
        host_cell: NUMA cell on the host.
        root_complex: the PCI root on the host.
        port: index of the guest's controller that it is plugged into.
        identity: of networked devices; None for others, and where no lease has decided it yet.
        parent: address of the PCI function that has it; empty if it is one itself.
    """

    key: str
    device_class: str
    host_cell: int
    root_complex: str
    port: int = 0
    identity: VfIdentity | None = None
    parent: str = ""

    @property
    def traits(self) -> DeviceTraits:
        """Of its class."""
        return traits_of(self.device_class)

    @property
    def function(self) -> str:
        """Address of the PCI function that it is, or that has it."""
        return self.parent or self.key
