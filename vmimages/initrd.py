# SPDX-License-Identifier: Apache-2.0
"""The initrd: vhpc-init, the guest agent, and the kernel modules needed to mount the root.

It is not compressed, because it is small, and in an emulated guest
decompression takes longer than reading it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from vhpc_slurm.architecture import X86_64, Architecture
from vhpc_slurm.bootfiles import elf
from vhpc_slurm.bootfiles import initrd as bootfiles
from vmimages.errors import BuildError
from vmimages.foreign import is_foreign
from vmimages.host import output
from vmimages.rootfs import Base

VERSION = re.compile(r"\b\d+\.\d+(?:\.\d+)?(?:[-+~][\w.]+)?\b", re.ASCII)
SOURCE_TREE = Path(__file__).resolve().parent.parent
INSTALLED = Path("/usr/libexec/vhpc")
# From the top of a build folder of CMake.
BUILT = {"vhpc-init": "guest/init/vhpc-init", "vhpc-agent": "guest/vhpc-agent"}
# Build folders of this checkout: the usual one, and that of `make demo` and of the lab.
BUILD_FOLDERS = ("build", "build/lab/programs")


def places(name: str, architecture: Architecture) -> tuple[Path, ...]:
    """Where the program may be: built in this checkout, then installed.

    Programs of another architecture than this host's are built in a folder of that name.
    """
    if is_foreign(architecture):
        return (SOURCE_TREE / "build" / architecture.debian / BUILT[name],)
    return (*(SOURCE_TREE / folder / BUILT[name] for folder in BUILD_FOLDERS), INSTALLED / name)


def program(name: str, given: Path | None, architecture: Architecture = X86_64) -> Path:
    """The program to put into the initrd: ``given``, or the first one found.

    Raises:
        BuildError: it does not exist, or is not a static program of the architecture.
    """
    searched = places(name, architecture)
    path = given or next((place for place in searched if place.exists()), None)
    if path is None:
        what = f"{name} is not built for {architecture.name}"
        raise BuildError(what, f"searched {', '.join(map(str, searched))}", _how(name, architecture))
    path = path.absolute()  # a name without a folder would be searched in PATH
    try:
        elf.check_static(path.read_bytes(), architecture)
    except OSError as err:
        raise BuildError(f"cannot read {name}", str(err)) from err
    except ValueError as err:
        raise BuildError(f"{path} cannot be {name}", str(err)) from err
    if not os.access(path, os.X_OK):
        raise BuildError(f"{path} is not executable")
    return path


def _how(name: str, architecture: Architecture) -> str:
    """The command that builds a program, or installs it where there are no sources."""
    option = "--" + name.removeprefix("vhpc-")
    foreign = is_foreign(architecture)
    if not (SOURCE_TREE / "CMakeLists.txt").exists():
        package = f"vhpc-image-tools of {architecture.debian}" if foreign else "vhpc-image-tools"
        return f"{'unpack' if foreign else 'install'} {package}, or name the program with {option}"
    folder = SOURCE_TREE / "build" / (architecture.debian if foreign else "")
    build = f"cmake -S {SOURCE_TREE} -B {folder} -DVHPC_SPANK=OFF -DBUILD_TESTING=OFF"
    if foreign:
        build += f" --toolchain {SOURCE_TREE}/cmake/{architecture.name}.cmake"
    return f"run: {build} && cmake --build {folder}; or name the program with {option}"


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
