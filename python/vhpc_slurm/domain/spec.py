# SPDX-License-Identifier: Apache-2.0
"""What a domain is made from, checked so that no value can be more than a value.

Templates escape markup.  The checks here are the second wall: names, paths and
the kernel command line reach QEMU's own option parsers behind libvirt, where a
comma or a newline would mean something.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from vhpc_slurm.errors import NodeError, UserError
from vhpc_slurm.model import NODE_NAME, Generation, GuestPlan

LIBVIRT_OLDEST = 9_000_000
DOMAIN_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,63}", re.ASCII)
SHARE_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,34}", re.ASCII)
PATH = re.compile(r"(/[A-Za-z0-9_.@+:-]+)+", re.ASCII)
CMDLINE = re.compile(r"[\x20-\x7e]{0,1800}", re.ASCII)
CPU_VENDOR = re.compile(r"[A-Za-z0-9 ]{0,12}", re.ASCII)
PCI_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", re.ASCII)
ROOT_FORMAT = re.compile(r"[a-z0-9]{1,16}", re.ASCII)
Hypervisor = Literal["kvm", "qemu"]
SOCKET_PATH_MAX = 107  # sun_path of unix(7) less its final NUL


@dataclass(frozen=True)
class ShareSpec:
    """A virtiofs device: the tag that the guest mounts, and the socket its daemon listens on."""

    tag: str
    socket: str


@dataclass(frozen=True)
class DomainSpec:
    """Everything that one guest's domain XML depends on.

    Attributes:
        name: libvirt's name of the domain.
        generation: whose guest it is; also the source of the domain's uuid.
        guest: CPUs, memory and devices, from the node plan.
        hypervisor: libvirt's domain type: ``kvm``, or ``qemu`` for software emulation (TCG).
        cpu_vendor: the host's, as in /proc/cpuinfo.
        libvirt_version: of the running libvirt: major * 1,000,000 + minor * 1,000 + release.
        emulator: QEMU binary; empty for libvirt's choice.
        kernel: bzImage of this guest alone: libvirt makes it the property of ``uid``; empty for a guest
            that is never to run.
        initrd: likewise.
        cmdline: kernel command line of the image; what every guest needs is added to it.
        root: raw image of the root file system; shared by guests, never written, never relabelled,
            so it has to be readable for everyone.
        root_format: file system in ``root``.
        uid: host uid of QEMU.
        gid: host gid of QEMU, the group that may open /dev/kvm.
        agent_socket: socket that QEMU listens on for the agent's port.
        console_log: file that the guest's serial console is written to.
        shares: virtiofs devices.
        invariant_tsc: the host's time stamp counter may be shown as one that never stops.
        partition: control group that libvirt puts the guest into; empty for libvirt's own.

    Raises:
        UserError: a value that comes from the image is not acceptable.
        NodeError: any other value is not.
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
    invariant_tsc: bool = True
    partition: str = ""

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
            raise UserError("the image's root format is not a file system's name")
        _check("domain name", self.name, DOMAIN_NAME)
        _check("CPU vendor", self.cpu_vendor, CPU_VENDOR)
        _check("guest hostname", self.guest.hostname, NODE_NAME)
        for what, path in (
            *([("kernel", self.kernel), ("initrd", self.initrd)] if self.kernel or self.initrd else []),
            ("root", self.root),
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
            _check("PCI address", device.address, PCI_ADDRESS)
        if self.uid <= 0 or self.gid <= 0:
            raise NodeError(
                f"QEMU would run as {self.uid}:{self.gid}", "neither may be root's", "see guests.uid_base"
            )


def check_path(what: str, path: str) -> None:
    """NodeError unless ``path`` is absolute, normal, and free of characters special to some parser."""
    _check(what, path, PATH)
    if {".", ".."} & set(path.split("/")):
        raise NodeError(f"{what} of a guest is not a normal path", repr(path))


def check_socket(what: str, path: str) -> None:
    """As ``check_path``, and short enough for a unix socket address."""
    check_path(what, path)
    if len(path) > SOCKET_PATH_MAX:
        raise NodeError(
            f"{what} of a guest has a path of {len(path)} characters",
            f"a unix socket's has at most {SOCKET_PATH_MAX}",
            "shorten paths.run",
        )


def format_version(number: int) -> str:
    """libvirt's version number as people write it: 9000000 is 9.0.0."""
    return f"{number // 1_000_000}.{number // 1_000 % 1_000}.{number % 1_000}"


def _check(what: str, value: str, pattern: re.Pattern[str]) -> None:
    if not pattern.fullmatch(value):
        raise NodeError(f"{what} of a guest has characters it may not have", repr(value[:120]))
