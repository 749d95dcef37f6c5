# SPDX-License-Identifier: Apache-2.0
"""Where a system tree has its Slurm: asked of Slurm's own files, never assumed to be Debian's places."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vlablib.report import LabError
from vlablib.settings import USERS

HEADER = "include/slurm/slurm_version.h"
_PREFIXES = ("usr", "usr/local", "opt/*", "opt/*/*")
_DAEMONS = ("slurmctld", "slurmd", "slurmdbd")
_COMMANDS = (
    "scontrol",
    "squeue",
    "sinfo",
    "scancel",
    "sacctmgr",
    "sacct",
    "sbatch",
    "srun",
    "salloc",
    "sbcast",
)
# a plugin that every Slurm of a lab has, and the one that slurmdbd needs
_AUTH, _DATABASE = "auth_munge.so", "accounting_storage_mysql.so"
_LIBRARY = "libslurmfull.so"
_CONF = re.compile(rb"\0(/[^\0]{1,200})/slurm\.conf\0")
# a configless slurmd keeps its copy there
_CONFIGLESS = "/run/"
# programs of the system that lab hosts run, without those of Slurm
_PROGRAMS = (
    *("usr/sbin/munged", "usr/sbin/mariadbd", "usr/sbin/libvirtd", "usr/bin/qemu-system-x86_64"),
    *("usr/libexec/virtiofsd", "usr/bin/python3", "usr/bin/setpriv", "opt/vhpc/bin/python"),
    *("usr/bin/vhpc", "usr/sbin/vhpcd"),
)
_FOLDERS = (
    "scratch",
    "shared",
    "usr/libexec/vhpc",
    "etc/vhpc",
    "var/log/vlab",
    "home",
    "var/lib/mysql/mysql",
)
_ACCOUNTS = ("slurm", "munge", "mysql", "libvirt-qemu", "vhpc", *(user.name for user in USERS))


@dataclass(frozen=True)
class Slurm:
    """Where hosts with a tree find their Slurm; paths as the hosts see them."""

    prefix: str
    # folder of slurm.conf
    conf: str
    # PluginDir
    plugins: str
    # "25.11.7"
    version: str

    @property
    def bin(self) -> str:
        """Folder of the commands."""
        return f"{self.prefix}/bin"


def prefix(tree: Path) -> Path:
    """The folder of the tree that its Slurm was installed to, found by Slurm's headers.

    Raises:
        LabError: the tree has no headers of Slurm, or those of several.
    """
    found = sorted(path for pattern in _PREFIXES for path in tree.glob(pattern) if (path / HEADER).is_file())
    # /opt/slurm may be a link to the release in use
    real = {path.resolve(): path for path in reversed(found)}
    if len(real) == 1:
        return next(iter(real.values()))
    places = ", ".join(f"/{pattern}" for pattern in _PREFIXES)
    if real:
        several = " and ".join(f"/{path.relative_to(tree)}" for path in sorted(real.values()))
        raise LabError(f"{tree} has the headers of several Slurms, in {several}; remove all but one")
    raise LabError(
        f"{tree} has no {HEADER} below any of {places}: run `make install` of Slurm with a prefix like "
        "/opt/slurm, or install libslurm-dev"
    )


def place_in_hosts(tree: Path) -> str:
    """The prefix of the tree's Slurm as hosts see it, such as /usr or /opt/slurm."""
    return f"/{prefix(tree).relative_to(tree)}"


def version(tree: Path) -> tuple[int, int, int]:
    """The release of the tree's Slurm, such as (24, 11, 5), from its headers."""
    header = prefix(tree) / HEADER
    match = re.search(r"SLURM_VERSION_NUMBER\s+0x([0-9a-fA-F]{6})", header.read_text(encoding="utf-8"))
    if match is None:
        raise LabError(f"{header} has no Slurm version")
    number = int(match[1], 16)
    return number >> 16, number >> 8 & 0xFF, number & 0xFF


def link_headers(tree: Path, folder: Path) -> Path:
    """Make ``folder`` an include folder with the headers of the tree's Slurm and no others; return it.

    A tree in which Slurm and pyslurm were built also has the headers of its libc,
    which may be another than this machine's.
    """
    folder.mkdir(parents=True, exist_ok=True)
    link, headers = folder / "slurm", (prefix(tree) / HEADER).parent.absolute()
    if not (link.is_symlink() and link.readlink() == headers):
        link.unlink(missing_ok=True)
        link.symlink_to(headers)
    return folder


def search(tree: Path) -> tuple[str, ...]:
    """Folders of Slurm that a login has in PATH, after the usual ones, as a site's profile gives them."""
    place = place_in_hosts(tree)
    return () if place in ("/usr", "/usr/local") else (f"{place}/bin", f"{place}/sbin")


def look(tree: Path) -> Slurm:
    """Find the parts of the tree's Slurm.

    Raises:
        LabError: its plugins or its default slurm.conf cannot be found.
    """
    place = prefix(tree)
    plugins = sorted({path.parent.resolve() for path in place.glob(f"lib*/**/{_AUTH}")})
    if len(plugins) != 1:
        raise LabError(
            f"{place} has {len(plugins)} folders with {_AUTH}, not 1: build Slurm where libmunge-dev is "
            "installed, and install one Slurm only"
        )
    major, minor, micro = version(tree)
    return Slurm(
        place_in_hosts(tree),
        _conf(plugins[0]),
        f"/{plugins[0].relative_to(tree.resolve())}",
        f"{major}.{minor:02}.{micro}",
    )


def _conf(plugins: Path) -> str:
    """The folder of slurm.conf that Slurm was built with (configure's sysconfdir)."""
    library = plugins / _LIBRARY
    if not library.is_file():
        raise LabError(f"{library} is missing: build Slurm with its shared library (the default)")
    found = {match[1].decode() for match in _CONF.finditer(library.read_bytes())}
    named = sorted(folder for folder in found if not folder.startswith(_CONFIGLESS))
    if len(named) != 1:
        raise LabError(f"{library} names {named or 'no folder'} as the place of slurm.conf, not one folder")
    return named[0]


def check(tree: Path) -> Slurm:
    """Look whether lab hosts can run on a tree that was made elsewhere; return its Slurm.

    Raises:
        LabError: everything that the tree lacks, a line each.
    """
    if not tree.is_dir():
        raise LabError(f"--tree {tree}: there is no such folder")
    if not (tree / "etc/passwd").is_file():
        raise LabError(f"--tree {tree}: not a system tree, it has no etc/passwd")
    slurm = look(tree)
    lacking = list(_lacking(tree, slurm))
    if lacking:
        lines = "\n  ".join(lacking)
        hint = "what it must hold: docs/contributing.md#another-slurm"
        raise LabError(f"{tree} cannot be the system of lab hosts ({hint}):\n  {lines}")
    return slurm


def _lacking(tree: Path, slurm: Slurm) -> Iterator[str]:
    accounts = {line.split(":")[0] for line in (tree / "etc/passwd").read_text(encoding="utf-8").splitlines()}
    for name in _ACCOUNTS:
        if name not in accounts:
            yield f"no account {name} in etc/passwd: chroot {tree} useradd --system {name}"
    place = slurm.prefix.lstrip("/")
    programs = (
        *(f"{place}/sbin/{name}" for name in _DAEMONS),
        *(f"{place}/bin/{name}" for name in _COMMANDS),
    )
    for name in programs:
        if not os.path.lexists(tree / name):  # Debian has absolute links
            yield f"no {name}: install all of Slurm below {slurm.prefix}"
    if not (tree / slurm.plugins.lstrip("/") / _DATABASE).is_file():
        yield f"no {slurm.plugins}/{_DATABASE}: build Slurm where libmariadb-dev is installed"
    for name in _PROGRAMS:
        if not os.path.lexists(tree / name):
            yield f"no {name}: start from a copy of a tree that vlab made"
    for name in _FOLDERS:
        if not (tree / name).is_dir():
            yield f"no folder {name}: start from a copy of a tree that vlab made"
    if not any(tree.glob("opt/vhpc/lib/python3.*/site-packages/vhpc_slurm")):
        yield "no folder vhpc_slurm in opt/vhpc's site-packages: start from a copy of a tree that vlab made"
