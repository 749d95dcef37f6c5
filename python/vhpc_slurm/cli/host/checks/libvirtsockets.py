# SPDX-License-Identifier: Apache-2.0
"""libvirt's sockets: users of jobs must not reach them.

Every distribution lets all users connect.  libvirtd takes 5,000 clients in all, and 20 that have not
authenticated yet, so a job's user could keep it from starting the guests of others.  The read-only socket
also shows all guests.  With systemd a socket has the mode of its unit, else that of libvirtd.conf.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vhpc_slurm.cli.host.checks import CheckResult, error, ok, warn

CLOSED_MODE = 0o600
OTHERS = 0o002
"""With the right to write to a socket a user may connect to it."""
RUN = Path("run/libvirt")
SYSTEMD_RUNS = Path("run/systemd/system")
"""Source: sd_booted(3)."""
DROP_IN = f"""# Written by vhpc setup node: users could use up libvirt's connections and see all guests.
[Socket]
SocketMode={CLOSED_MODE:04o}
"""
_FOLDERS = ("usr/lib/systemd/system", "run/systemd/system", "etc/systemd/system")
_UNIT = re.compile(r"(libvirtd|virt[a-z]+d)(-ro)?\.socket")
_LISTENS = re.compile(r"^ListenStream=(/var)?/run/libvirt/", re.MULTILINE)
_MODE = re.compile(r"^SocketMode=\s*([0-7]+)\s*$", re.MULTILINE)


@dataclass(frozen=True)
class SocketUnit:
    """A socket unit of libvirt.

    Attributes:
        name: its file name.
        mode: of the socket, after all drop-ins.
        drop_in: the file in which vhpc sets it.
    """

    name: str
    mode: int
    drop_in: Path

    @property
    def is_open(self) -> bool:
        """Whether every user may connect."""
        return bool(self.mode & OTHERS)


def units(root: Path = Path("/")) -> list[SocketUnit]:
    """The socket units of libvirt's daemons that are installed and not masked."""
    files: dict[str, Path] = {}
    for folder in _FOLDERS:  # the last one wins
        files |= {path.name: path for path in (root / folder).glob("*.socket") if _UNIT.fullmatch(path.name)}
    found = []
    for name, path in sorted(files.items()):
        text = _text(path)
        if not _LISTENS.search(text):
            continue  # masked, or another program's
        drop_ins: dict[str, Path] = {}
        for folder in _FOLDERS:
            drop_ins |= {one.name: one for one in (root / folder / f"{name}.d").glob("*.conf")}
        modes = [
            m
            for one in (path, *(drop_ins[key] for key in sorted(drop_ins)))
            for m in _MODE.findall(_text(one))
        ]
        mode = int(modes[-1], 8) if modes else 0o666
        # after those of most sites, which begin with digits
        found.append(SocketUnit(name, mode, root / _FOLDERS[-1] / f"{name}.d" / "vhpc.conf"))
    return found


def open_sockets(root: Path = Path("/")) -> list[Path]:
    """Sockets of libvirt that every user may connect to now."""
    found = []
    for path in sorted((root / RUN).glob("*-sock*")):
        try:
            mode = path.stat().st_mode
        except OSError:
            continue  # removed meanwhile, or in a folder that is closed
        if stat.S_ISSOCK(mode) and mode & OTHERS:
            found.append(path)
    return found


def daemon_of(path: Path) -> str:
    """The daemon that listens on a socket: libvirtd, or one of the separate daemons, such as virtqemud."""
    name = path.name.partition("-")[0]
    return "libvirtd" if name == "libvirt" else name


def check(root: Path = Path("/")) -> Iterator[CheckResult]:
    """Whether users can connect to libvirt, now or after the next start of its sockets."""
    name = "node.libvirt_sockets"
    now, later = open_sockets(root), list[str]()
    if (root / SYSTEMD_RUNS).is_dir():
        later = [unit.name for unit in units(root) if unit.is_open]
    if now:
        hint = "vhpc setup node"
        if not later:  # the daemon made them
            daemons = " ".join(sorted({daemon_of(path) for path in now}))
            files = ", ".join(f"{name}.conf" for name in daemons.split())
            hint = f'{files}: unix_sock_ro_perms = "0700", unix_sock_rw_perms = "0700"; restart {daemons}'
        yield error(
            name,
            f"every user can connect to {', '.join(map(str, now))}: a job's user can keep libvirt from "
            "starting guests, and sees the guests of others",
            hint,
        )
    elif later:
        yield warn(
            name, f"every user can connect to libvirt when {', '.join(later)} starts", "vhpc setup node"
        )
    elif (root / RUN).is_dir():
        yield ok(name, "users cannot connect to libvirt")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
