# SPDX-License-Identifier: Apache-2.0
"""Input of the domain XML, checked so that no value can inject an option.

Templates escape markup.  These checks are a second defence: libvirt passes
names, paths and the kernel command line to QEMU's option parsers, in which a
comma or a newline is special.
"""

from __future__ import annotations

import re

from vhpc_slurm.architecture import Architecture, named
from vhpc_slurm.errors import NodeError, UserError
from vhpc_slurm.model import NODE_NAME, Generation, GuestPlan, HostInventory, ImageManifest, RunningGuest
from vhpc_slurm.record import Record

DOMAIN_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,63}", re.ASCII)
SHARE_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,34}", re.ASCII)
PATH = re.compile(r"(/[A-Za-z0-9_.@+:-]+)+", re.ASCII)
CMDLINE = re.compile(r"[\x20-\x7e]{0,1800}", re.ASCII)
CPU_VENDOR = re.compile(r"[A-Za-z0-9 ]{0,12}", re.ASCII)
INTERFACE = re.compile(r"[a-z0-9]{1,15}", re.ASCII)
MAC = re.compile(r"[0-9a-f]{2}(:[0-9a-f]{2}){5}", re.ASCII)
ROOT_FORMAT = re.compile(r"[a-z0-9]{1,16}", re.ASCII)
SOCKET_PATH_MAX = 107  # sun_path of unix(7) less its final NUL


class DomainSpec(Record, frozen=True):
    """All input of one guest's domain XML.

    Attributes:
        name: libvirt's name of the domain.
        generation: owner of the guest; also the source of the domain's uuid.
        running: the guest: CPUs, memory and devices; uid of QEMU; its files.  libvirt changes the owner of
            kernel and initrd to that uid; they are empty for a guest that never runs.  The root is shared
            by guests, never written, never relabelled, so all users must be able to read it.
        host: says whether there is KVM, and which CPU.
        manifest: has the architecture, the format of the root and the image's kernel parameters; others are
            added.
        gid: host gid of QEMU, the group that may open /dev/kvm.
        libvirt_version: version of the running libvirt: major * 1,000,000 + minor * 1,000 + release.
        emulator: QEMU binary; empty for libvirt's choice.
        partition: control group into which libvirt puts the guest; empty for libvirt's default.
        firmware: file of a UEFI; empty for the firmware of QEMU, or none.
        saveable: the guest can be saved in a checkpoint, so it has no CPU feature that cannot.

    Raises:
        UserError: a value from the image is not valid.
        NodeError: any other value is not valid.
    """

    name: str
    generation: Generation
    running: RunningGuest
    host: HostInventory
    manifest: ImageManifest
    gid: int
    libvirt_version: int
    emulator: str = ""
    firmware: str = ""
    partition: str = ""
    saveable: bool = False

    @property
    def guest(self) -> GuestPlan:
        """The plan of the guest."""
        return self.running.plan

    @property
    def architecture(self) -> Architecture:
        """The values that depend on the architecture of the image."""
        return named(self.manifest.arch)

    @property
    def kvm(self) -> bool:
        """Whether the guest runs with hardware virtualization; else in software emulation (TCG)."""
        return self.host.kvm

    def __post_init__(self) -> None:
        self._check_versions()
        guest, paths, shares = self.guest, self.guest.paths, self.running.shares
        if not CMDLINE.fullmatch(self.manifest.cmdline):
            raise UserError("the image's kernel command line is not ASCII text of at most 1800 characters")
        if not ROOT_FORMAT.fullmatch(self.manifest.root_format):
            raise UserError("the image's root format is not a file system type")
        _check("domain name", self.name, DOMAIN_NAME)
        _check("CPU vendor", self.host.cpu_vendor, CPU_VENDOR)
        _check("guest hostname", guest.hostname, NODE_NAME)
        for what, path in (
            *([("kernel", paths.kernel), ("initrd", paths.initrd)] if paths.kernel or paths.initrd else []),
            ("root", paths.root),
            *([("disk", paths.disk)] if paths.disk else []),
            ("console log", paths.console_log),
            *([("emulator", self.emulator)] if self.emulator else []),
            *([("firmware", self.firmware)] if self.firmware else []),
            *([("control group", self.partition)] if self.partition else []),
        ):
            check_path(what, path)
        check_socket("agent socket", paths.agent_socket)
        for share in shares:
            _check("share tag", share.tag, SHARE_TAG)
            if share.snapshot:
                check_path(f"snapshot of share {share.tag}", share.snapshot)
                continue
            check_socket(f"socket of share {share.tag}", paths.share_socket(share.tag))
        if self.running.has_locks:
            check_socket("socket of the lock daemon", paths.locks_socket)
        if len({share.tag for share in shares}) != len(shares):
            raise NodeError("two shares of a guest have the same tag")
        for device in guest.devices:
            _check(device.traits.key_name, device.key, device.traits.key_form)
        if guest.interface is not None:
            _check("interface", guest.interface.tap, INTERFACE)
            _check("MAC address", guest.interface.mac, MAC)
        if guest.nat is not None:
            _check("MAC address", guest.nat.mac, MAC)
            check_socket("socket of passt", paths.nat_socket)
        if self.running.uid <= 0 or self.gid <= 0:
            raise NodeError(
                f"QEMU would run as {self.running.uid}:{self.gid}",
                "uid and gid must not be root's",
                "see guests.uid_base",
            )

    def _check_versions(self) -> None:
        """Refuse a node that is too old for the architecture, or lacks its UEFI."""
        try:
            oldest = self.architecture.libvirt_oldest
        except ValueError as err:
            raise UserError(f"image {self.manifest.name}:{self.manifest.tag} cannot run", str(err)) from err
        if self.libvirt_version < oldest:
            raise NodeError(
                f"libvirt {format_version(self.libvirt_version)} is too old",
                f"guests of {self.manifest.arch} need {format_version(oldest)} or newer",
            )
        if self.guest.devices and self.architecture.firmware and not self.firmware:
            raise NodeError(
                "the node has no UEFI for guests with devices",
                f"none of {', '.join(self.architecture.firmware)} exists",
                "install qemu-efi-aarch64 (Debian), edk2-aarch64 (RHEL) or qemu-uefi-aarch64 (SUSE)",
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
