# SPDX-License-Identifier: Apache-2.0
"""Builds for another architecture than this host's: its programs run in QEMU's user mode emulation.

``python3 -m vmimages.foreign ARCH`` checks for packaging/ that this host runs programs of Debian's ARCH.

Source: Linux Documentation/admin-guide/binfmt-misc.rst.
"""

from __future__ import annotations

import sys
from pathlib import Path

from vhpc_slurm.architecture import ARCHITECTURES, Architecture, own
from vmimages.errors import BuildError
from vmimages.host import need

ENTRIES = Path("/proc/sys/fs/binfmt_misc")
_MACHINE = slice(18, 20)
"""Bytes of e_machine in an ELF header."""


def is_foreign(architecture: Architecture) -> bool:
    """Whether this host emulates programs of an architecture."""
    return architecture is not own()


def need_emulation(architecture: Architecture, entries: Path = ENTRIES) -> None:
    """Check that this host runs programs of an architecture, also in another root.

    Raises:
        BuildError: the kernel has no interpreter for them, or a tool is missing.
    """
    if not is_foreign(architecture):
        return
    need("arch-test")
    if not any(_is_interpreter(path, architecture) for path in entries.glob("*")):
        raise BuildError(
            f"this host cannot run programs for {architecture.name}",
            f"{entries} has no enabled entry for them with the flag F",
            "apt-get install qemu-user-static, then systemctl restart systemd-binfmt, or without systemd, as "
            f"root: cat /usr/lib/binfmt.d/qemu-{architecture.name}.conf >{entries}/register",
        )


def _is_interpreter(entry: Path, architecture: Architecture) -> bool:
    """Whether an entry starts programs of the architecture by an interpreter that is open already."""
    try:
        state, *lines = entry.read_text(encoding="utf-8").splitlines()
        values = dict(line.split(maxsplit=1) for line in lines if " " in line)
        magic = bytes.fromhex(values.get("magic", ""))
    except (OSError, ValueError):  # "register" cannot be read
        return False
    machine = int.from_bytes(magic[_MACHINE], "little")
    return state == "enabled" and machine == architecture.elf_machine and "F" in values.get("flags:", "")


def main(name: str) -> str:
    """Why packages for an architecture, by Debian's name, cannot be built here; empty if they can."""
    known = {one.debian: one for one in ARCHITECTURES.values()}
    if name not in known:
        return f"unknown architecture {name}; known: {', '.join(sorted(known))}"
    try:
        need_emulation(known[name])
    except (BuildError, ValueError) as err:
        return str(err)
    return ""


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]) or 0)
