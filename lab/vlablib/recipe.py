# SPDX-License-Identifier: Apache-2.0
"""What a lab host's system consists of, for each Debian suite."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

from vmimages.recipe import steps

CUSTOMIZE = Path(__file__).resolve().parents[1] / "rootfs" / "customize"

_PACKAGES = (
    # Slurm with accounting
    "slurmctld",
    "slurmd",
    "slurm-client",
    "slurmdbd",
    "libslurm-dev",
    "munge",
    "mariadb-server",
    # libvirt and QEMU
    "libvirt-daemon-system",
    "libvirt-clients",
    "qemu-system-x86",
    "seabios",
    # a simulated InfiniBand fabric with a real subnet manager, for `vlab up --fabric`
    "ibsim-utils",
    "infiniband-diags",
    "opensm",
    # what vhpc needs
    "hwloc-nox",
    "iproute2",
    "procps",
    "python3",
    "python3-jinja2",
    "python3-libvirt",
    "python3-venv",
    "util-linux",
)
# third-party Python packages of /opt/vhpc that Debian lacks or has too old
PYTHON_PACKAGES = ("msgspec>=0.18", "rich>=13", "typer>=0.9")


@dataclass(frozen=True)
class Suite:
    """One Debian suite, and with it one Slurm major version."""

    name: str
    extra: tuple[str, ...]
    apt_options: tuple[str, ...] = ()
    # what the archive calls it, where the tree has a name of its own
    archive: str = field(default="", repr=False)
    # what else is done to the fresh tree, of which a disk is made then
    finish: Path | None = field(default=None, repr=False)
    # Debian 12 has only the C virtiofsd, which cannot run as a plain user
    virtiofsd: str = "/usr/libexec/virtiofsd"
    virtiofsd_from: str = ""

    @property
    def packages(self) -> tuple[str, ...]:
        """All packages that the tree is made from."""
        return _PACKAGES + self.extra

    def digest(self) -> str:
        """Name this recipe: a change of any input gives another tree."""
        content = repr((self, self.packages, PYTHON_PACKAGES)).encode() + steps(CUSTOMIZE).encode()
        if self.finish is not None:
            content += self.archive.encode() + steps(self.finish).encode()
        return hashlib.sha256(content).hexdigest()[:12]


_MODERN = ("libvirt-daemon-driver-qemu", "virtiofsd")
SUITES = {
    suite.name: suite
    for suite in (
        Suite("trixie", _MODERN),
        Suite(
            "bookworm",
            ("patchelf",),
            virtiofsd="/opt/virtiofsd/bin/virtiofsd",
            virtiofsd_from="trixie",
        ),
        # a mirror of the moving suite may be a snapshot whose Release has run out
        Suite("sid", _MODERN, ('Acquire::Check-Valid-Until "false"',)),
    )
}
DEFAULT_SUITE = "trixie"
# the hardware lab's machine: the same system with an init and a kernel that has device drivers
HARDWARE = Suite(
    "hardware",
    (*_MODERN, "busybox", "dbus", "linux-image-amd64", "pciutils", "systemd-sysv", "udev"),
    archive="trixie",
    finish=CUSTOMIZE.with_name("hardware"),
)
