# SPDX-License-Identifier: Apache-2.0
"""Packages and settings of a lab host's system, for each Debian suite."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from pathlib import Path

from vmimages.recipe import steps

from vhpc_slurm.architecture import AARCH64, Architecture
from vlablib.settings import BARE_NAMES

CUSTOMIZE = Path(__file__).resolve().parents[1] / "rootfs" / "customize"
_SITE = CUSTOMIZE.with_name("site")

# Slurm with accounting; its headers say where it is
_SLURM = (
    "slurmctld",
    "slurmd",
    "slurm-client",
    "slurmdbd",
    "libslurm-dev",
    "munge",
    "mariadb-server",
)
_PACKAGES = (
    *_SLURM,
    # libvirt and QEMU
    "libvirt-daemon-system",
    "libvirt-clients",
    "qemu-system-arm",
    "qemu-system-x86",
    "qemu-utils",
    "seabios",
    # a simulated InfiniBand fabric with a real subnet manager, for `vlab up --fabric`
    "ibsim-utils",
    "infiniband-diags",
    "opensm",
    # for vhpc
    "bubblewrap",
    "cryptsetup-bin",
    "docker-registry",
    "e2fsprogs",
    "erofs-utils",
    "hwloc-nox",
    "iproute2",
    "nftables",
    "nginx",  # in front of vhpc web
    "openssh-client",
    "procps",
    "prometheus",  # promtool, which checks the alert rules
    "python3",
    "python3-jinja2",
    "python3-libvirt",
    "python3-venv",
    "skopeo",
    "util-linux",
    "zstd",
)
# third-party Python packages of /opt/vhpc that Debian lacks or has in old versions
PYTHON_PACKAGES = (
    "PyMySQL>=1.0",
    "cryptography>=38",
    "msgspec>=0.18",
    "oslo.utils>=8",
    "prometheus-client>=0.16",
    "rich>=13",
    "starlette>=0.26",
    "typer>=0.9",
    "uvicorn>=0.17",
)


@dataclass(frozen=True)
class Suite:
    """One Debian suite, with its Slurm major version."""

    name: str
    extra: tuple[str, ...]
    apt_options: tuple[str, ...] = ()
    # another one than this machine's, whose programs then run in user mode emulation
    architecture: Architecture | None = field(default=None, repr=False)
    # the archive's name of the suite, if the tree has another name
    archive: str = field(default="", repr=False)
    # scripts that are run on the new tree, in this order; a disk is then made from the tree
    finish: tuple[Path, ...] = field(default=(), repr=False)
    # files that they read
    inputs: tuple[Path, ...] = field(default=(), repr=False)
    # Debian 12 has only the C virtiofsd, which cannot run as an ordinary user
    virtiofsd: str = "/usr/libexec/virtiofsd"
    virtiofsd_from: str = ""
    # what pip installs; if nothing, packages of the suite suffice
    python: tuple[str, ...] = field(default=PYTHON_PACKAGES, repr=False)
    # mmdebstrap's customize hook
    customize: Path = field(default=CUSTOMIZE, repr=False)
    # what all other suites have
    common: tuple[str, ...] = field(default=_PACKAGES, repr=False)

    @property
    def packages(self) -> tuple[str, ...]:
        """All packages of the tree."""
        return self.common + self.extra

    def digest(self) -> str:
        """Digest of all inputs of the tree, which names the tree."""
        content = repr((self, self.packages, self.python)).encode() + steps(CUSTOMIZE).encode()
        content += steps(_SITE).encode()
        if self.customize != CUSTOMIZE:
            content += steps(self.customize).encode()
        if self.finish:
            content += self.archive.encode()
        for script in (*self.finish, *self.inputs):
            content += steps(script).encode()
        return hashlib.sha256(content).hexdigest()[:12]


_MODERN = ("libvirt-daemon-driver-qemu", "virtiofsd")
SUITES = {
    suite.name: suite
    for suite in (
        Suite("trixie", (*_MODERN, "passt")),
        Suite(
            "bookworm",
            ("patchelf",),
            virtiofsd="/opt/virtiofsd/bin/virtiofsd",
            virtiofsd_from="trixie",
        ),
        # a mirror of a rolling suite may be a snapshot with an expired Release file
        Suite("sid", (*_MODERN, "passt"), ('Acquire::Check-Valid-Until "false"',)),
    )
}
DEFAULT_SUITE = "trixie"
# hosts with vhpc's Debian packages have what these depend on, and no Python environment
PACKAGED = Suite(
    "packaged",
    (
        *_MODERN,
        *("passt", "python3-cryptography", "python3-msgspec", "python3-oslo.utils"),
        *("python3-rich", "python3-typer"),
    ),
    archive="trixie",
    customize=CUSTOMIZE.with_name("packaged"),
)
# `vlab up --bare`: Slurm without vhpc and all that it needs; python3 is for vlab's own init
BARE = {
    archive: Suite(
        name,
        ("procps", "python3-minimal"),
        archive=archive,
        customize=CUSTOMIZE.with_name("bare"),
        common=_SLURM,
    )
    for archive, name in BARE_NAMES.items()
}
# the hardware lab's machine: the same system with an init and a kernel that has device drivers
HARDWARE = Suite(
    "hardware",
    (
        *_MODERN,
        *("busybox", "dbus", "linux-image-amd64", "pciutils", "systemd-sysv", "udev"),
        # for encrypted job networks: this kernel has wireguard
        *("python3-cryptography", "wireguard-tools"),
    ),
    archive="trixie",
    finish=(CUSTOMIZE.with_name("hardware"),),
)
# `hwlab up --arch arm64`: what that machine needs, and no more, because packages are installed in emulation
HARDWARE_ARM = Suite(
    "arm64",
    (
        *_MODERN,
        *("busybox", "dbus", "linux-image-arm64", "pciutils", "systemd-sysv", "udev"),
        *("python3-cryptography", "wireguard-tools", "qemu-efi-aarch64"),
        *("python3-msgspec", "python3-oslo.utils", "python3-prometheus-client"),
        *("python3-rich", "python3-typer"),
    ),
    architecture=AARCH64,
    python=(),
    archive="trixie",
    finish=HARDWARE.finish,
    common=(
        *("slurmctld", "slurmd", "slurm-client", "libslurm-dev", "munge"),
        *("libvirt-daemon-system", "libvirt-clients", "qemu-system-arm", "qemu-utils"),
        *("bubblewrap", "cryptsetup-bin", "e2fsprogs", "erofs-utils", "hwloc-nox", "iproute2", "nftables"),
        *("openssh-client", "procps", "python3", "python3-jinja2", "python3-libvirt", "python3-venv"),
        *("util-linux", "zstd"),
    ),
)
# `hwlab up --selinux`: the same with Debian's policy and vhpc's module, which packages for RHEL contain
SELINUX = replace(
    HARDWARE,
    name="selinux",
    extra=(
        *HARDWARE.extra,
        *("auditd", "passt", "policycoreutils", "selinux-policy-default", "selinux-policy-dev"),
    ),
    finish=(*HARDWARE.finish, CUSTOMIZE.with_name("selinux")),
    inputs=(
        *sorted((CUSTOMIZE.parents[2] / "packaging/rpm/selinux").glob("vhpc.*")),
        *sorted((CUSTOMIZE.parents[1] / "hardware/selinux").iterdir()),
    ),
)


# `vlab up --tree`: made elsewhere, so it has no packages here and no digest
OTHER = Suite("tree", ())


def named(name: str) -> Suite:
    """The suite of a lab's record."""
    return {one.name: one for one in (PACKAGED, *BARE.values(), OTHER)}.get(name) or SUITES[name]
