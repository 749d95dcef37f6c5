# SPDX-License-Identifier: Apache-2.0
"""The initrd: vhpc-init, the guest agent, and the kernel modules needed to mount the root.

It is not compressed, because it is small, and in an emulated guest
decompression takes longer than reading it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from vhpc_slurm.bootfiles import elf
from vhpc_slurm.bootfiles import initrd as bootfiles
from vmimages.errors import BuildError
from vmimages.host import output
from vmimages.rootfs import Base

VERSION = re.compile(r"\b\d+\.\d+(?:\.\d+)?(?:[-+~][\w.]+)?\b", re.ASCII)
SOURCE_TREE = Path(__file__).resolve().parent.parent
# Paths in the build folder, then installed paths.
PLACES = {
    "vhpc-init": (SOURCE_TREE / "build/guest/init/vhpc-init", Path("/usr/libexec/vhpc/vhpc-init")),
    "vhpc-agent": (SOURCE_TREE / "build/guest/vhpc-agent", Path("/usr/libexec/vhpc/vhpc-agent")),
}


def program(name: str, given: Path | None) -> Path:
    """The program to put into the initrd: ``given``, or the first one found.

    Raises:
        BuildError: it does not exist, or is not a static x86-64 program.
    """
    path = given or next((place for place in PLACES[name] if place.exists()), None)
    option = "--" + name.removeprefix("vhpc-")
    if path is None:
        places = ", ".join(str(place) for place in PLACES[name])
        raise BuildError(f"{name} is not built", f"searched {places}", f"run make, or pass it with {option}")
    path = path.absolute()  # a name without a folder would be searched in PATH
    try:
        elf.check_static(path.read_bytes())
    except OSError as err:
        raise BuildError(f"cannot read {name}", str(err)) from err
    except ValueError as err:
        raise BuildError(f"{path} cannot be {name}", str(err)) from err
    if not os.access(path, os.X_OK):
        raise BuildError(f"{path} is not executable")
    return path


def version(path: Path) -> str:
    """The version that a program prints; BuildError if it prints none."""
    said = output([str(path), "--version"], timeout_s=10).decode(errors="replace")
    match = VERSION.search(said)
    if match is None:
        raise BuildError(f"{path} --version prints no version", said[:80].strip())
    return match[0]


def initrd(base: Base, init: Path, agent: Path, epoch: int) -> bytes:
    """The initrd's bytes, which depend only on the modules, the two programs and the epoch."""
    modules = {path.name: path.read_bytes() for path in base.modules.iterdir()}
    return bootfiles.initrd(init.read_bytes(), agent.read_bytes(), modules, epoch)
