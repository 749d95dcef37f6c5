# SPDX-License-Identifier: Apache-2.0
"""The initrd: vhpc-init, the guest agent, and the kernel modules needed to mount the root.

It is not compressed, because it is small, and in an emulated guest
decompression takes longer than reading it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from vhpc_slurm.architecture import X86_64
from vhpc_slurm.bootfiles import elf
from vhpc_slurm.bootfiles import initrd as bootfiles
from vmimages.errors import BuildError
from vmimages.host import output
from vmimages.rootfs import Base

VERSION = re.compile(r"\b\d+\.\d+(?:\.\d+)?(?:[-+~][\w.]+)?\b", re.ASCII)
SOURCE_TREE = Path(__file__).resolve().parent.parent
INSTALLED = Path("/usr/libexec/vhpc")
# From the top of a build folder of CMake.
BUILT = {"vhpc-init": "guest/init/vhpc-init", "vhpc-agent": "guest/vhpc-agent"}
# Build folders of this checkout: the usual one, and that of `make demo` and of the lab.
BUILD_FOLDERS = ("build", "build/lab/programs")


def places(name: str) -> tuple[Path, ...]:
    """Where the program may be: built in this checkout, then installed."""
    return (*(SOURCE_TREE / folder / BUILT[name] for folder in BUILD_FOLDERS), INSTALLED / name)


def program(name: str, given: Path | None) -> Path:
    """The program to put into the initrd: ``given``, or the first one found.

    Raises:
        BuildError: it does not exist, or is not a static x86-64 program.
    """
    path = given or next((place for place in places(name) if place.exists()), None)
    if path is None:
        raise BuildError(f"{name} is not built", f"searched {', '.join(map(str, places(name)))}", _how(name))
    path = path.absolute()  # a name without a folder would be searched in PATH
    try:
        elf.check_static(path.read_bytes(), X86_64)
    except OSError as err:
        raise BuildError(f"cannot read {name}", str(err)) from err
    except ValueError as err:
        raise BuildError(f"{path} cannot be {name}", str(err)) from err
    if not os.access(path, os.X_OK):
        raise BuildError(f"{path} is not executable")
    return path


def _how(name: str) -> str:
    """The command that builds a program, or installs it where there are no sources."""
    option = "--" + name.removeprefix("vhpc-")
    if not (SOURCE_TREE / "CMakeLists.txt").exists():
        return f"install vhpc-image-tools, or name the program with {option}"
    build = f"cmake -S {SOURCE_TREE} -B {SOURCE_TREE}/build -DVHPC_SPANK=OFF -DBUILD_TESTING=OFF"
    return f"run: {build} && cmake --build {SOURCE_TREE}/build; or name the program with {option}"


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
