# SPDX-License-Identifier: Apache-2.0
"""Input of the domain XML, checked so that no value can inject an option.

Templates escape markup.  These checks are a second defence: libvirt passes
names, paths and the kernel command line to QEMU's option parsers, in which a
comma or a newline is special.
"""

from __future__ import annotations

import re
from typing import Literal

from vhpc_slurm.errors import NodeError, UserError
from vhpc_slurm.model import NODE_NAME, Generation, GuestPlan, SitePort
from vhpc_slurm.record import Record

LIBVIRT_OLDEST = 9_000_000
DOMAIN_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,63}", re.ASCII)
SHARE_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,34}", re.ASCII)
PATH = re.compile(r"(/[A-Za-z0-9_.@+:-]+)+", re.ASCII)
CMDLINE = re.compile(r"[\x20-\x7e]{0,1800}", re.ASCII)
CPU_VENDOR = re.compile(r"[A-Za-z0-9 ]{0,12}", re.ASCII)
INTERFACE = re.compile(r"[a-z0-9]{1,15}", re.ASCII)
MAC = re.compile(r"[0-9a-f]{2}(:[0-9a-f]{2}){5}", re.ASCII)
ROOT_FORMAT = re.compile(r"[a-z0-9]{1,16}", re.ASCII)
Hypervisor = Literal["kvm", "qemu"]
SOCKET_PATH_MAX = 107  # sun_path of unix(7) less its final NUL


class ShareSpec(Record, frozen=True):
    """A virtiofs device: the tag that the guest mounts, and the socket on which its daemon listens."""

    tag: str
    socket: str


class DomainSpec(Record, frozen=True):
    """All input of one guest's domain XML.

    Attributes:
        name: libvirt's name of the domain.
        generation: owner of the guest; also the source of the domain's uuid.
        guest: CPUs, memory and devices, from the node plan.
        hypervisor: libvirt's domain type: ``kvm``, or ``qemu`` for software emulation (TCG).
        cpu_vendor: CPU vendor of the host, as in /proc/cpuinfo.
        libvirt_version: version of the running libvirt: major * 1,000,000 + minor * 1,000 + release.
        emulator: QEMU binary; empty for libvirt's choice.
        kernel: bzImage copy for this guest only, because libvirt changes its owner to ``uid``; empty for
            a guest that never runs.
        initrd: likewise.
        cmdline: kernel command line of the image; the parameters that every guest needs are added.
        root: raw image of the root file system; shared by guests, never written, never relabelled,
            so all users must be able to read it.
        root_format: file system in ``root``.
        disk: raw file of its own disk, for changes to the root or for its mount point; empty: it has none.
        uid: host uid of QEMU.
        gid: host gid of QEMU, the group that may open /dev/kvm.
        agent_socket: socket on which QEMU listens for the agent's port.
        console_log: file to which the guest's serial console is written.
        shares: virtiofs devices.
        invariant_tsc: the host has an invariant time stamp counter, which the guest may use.
        partition: control group into which libvirt puts the guest; empty for libvirt's default.
        mtu: of the interface on the network of the job; 0 leaves it to libvirt.
        site_port: on the bridge of the site; None leaves the interface out.

    Raises:
        UserError: a value from the image is not valid.
        NodeError: any other value is not valid.
    """

    name: str
    generation: Generation
    guest: GuestPlan
    hypervisor: Hypervisor
    cpu_vendor: str
    libvirt_version: int
    emulator: str
    kernel: str
    initrd: str
    cmdline: str
    root: str
    uid: int
    gid: int
    agent_socket: str
    console_log: str
    shares: tuple[ShareSpec, ...] = ()
    root_format: str = "erofs"
    disk: str = ""
    invariant_tsc: bool = True
    partition: str = ""
    mtu: int = 0
    site_port: SitePort | None = None

    @property
    def kvm(self) -> bool:
        """Whether the guest runs with hardware virtualization."""
        return self.hypervisor == "kvm"

    def __post_init__(self) -> None:
        if self.libvirt_version < LIBVIRT_OLDEST:
            raise NodeError(
                f"libvirt {format_version(self.libvirt_version)} is too old",
                f"guests need {format_version(LIBVIRT_OLDEST)} or newer",
            )
        if not CMDLINE.fullmatch(self.cmdline):
            raise UserError("the image's kernel command line is not ASCII text of at most 1800 characters")
        if not ROOT_FORMAT.fullmatch(self.root_format):
            raise UserError("the image's root format is not a file system type")
        _check("domain name", self.name, DOMAIN_NAME)
        _check("CPU vendor", self.cpu_vendor, CPU_VENDOR)
        _check("guest hostname", self.guest.hostname, NODE_NAME)
        for what, path in (
            *([("kernel", self.kernel), ("initrd", self.initrd)] if self.kernel or self.initrd else []),
            ("root", self.root),
            *([("disk", self.disk)] if self.disk else []),
            ("console log", self.console_log),
            *([("emulator", self.emulator)] if self.emulator else []),
            *([("control group", self.partition)] if self.partition else []),
        ):
            check_path(what, path)
        check_socket("agent socket", self.agent_socket)
        for share in self.shares:
            _check("share tag", share.tag, SHARE_TAG)
            check_socket(f"socket of share {share.tag}", share.socket)
        if len({share.tag for share in self.shares}) != len(self.shares):
            raise NodeError("two shares of a guest have the same tag")
        for device in self.guest.devices:
            _check(device.traits.key_name, device.key, device.traits.key_form)
        if self.guest.interface is not None:
            _check("interface", self.guest.interface.tap, INTERFACE)
            _check("MAC address", self.guest.interface.mac, MAC)
        if self.guest.nat is not None:
            _check("MAC address", self.guest.nat.mac, MAC)
            check_socket("socket of passt", self.guest.paths.nat_socket)
        if self.uid <= 0 or self.gid <= 0:
            raise NodeError(
                f"QEMU would run as {self.uid}:{self.gid}",
                "uid and gid must not be root's",
                "see guests.uid_base",
            )


def check_path(what: str, path: str) -> None:
    """Raise NodeError unless ``path`` is absolute, normalized, and without characters special to a parser."""
    _check(what, path, PATH)
    if {".", ".."} & set(path.split("/")):
        raise NodeError(f"{what} of a guest is not a normalized path", repr(path))


def check_socket(what: str, path: str) -> None:
    """As ``check_path``; the path must also fit into a unix socket address."""
    check_path(what, path)
    if len(path) > SOCKET_PATH_MAX:
        raise NodeError(
            f"{what} of a guest has a path of {len(path)} characters",
            f"the path of a unix socket has at most {SOCKET_PATH_MAX}",
            "shorten paths.run",
        )


def format_version(number: int) -> str:
    """libvirt's version number as text: 9000000 is 9.0.0."""
    return f"{number // 1_000_000}.{number // 1_000 % 1_000}.{number % 1_000}"


def _check(what: str, value: str, pattern: re.Pattern[str]) -> None:
    if not pattern.fullmatch(value):
        raise NodeError(f"{what} of a guest contains characters that are not allowed", repr(value[:120]))
