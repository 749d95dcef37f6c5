# SPDX-License-Identifier: Apache-2.0
"""Installs the checkout into the hosts: C programs, the Python package, the hooks.

All hosts see one folder of installed files through bind mounts.  Renames in it
install a new version on all hosts at once; only daemons need a restart.
A part without source is skipped with a note.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from vlablib import slurmtree
from vlablib.report import LabError, say, step
from vlablib.settings import CHECKOUT, Lab, Record

_BUILD_JOBS = "2"
_BUILDS = CHECKOUT / "build/lab"


@dataclass(frozen=True)
class Deployment:
    """Result of an installation."""

    # units that now run old files
    stale: set[str]
    # one text for each part that could not be built; its installed files stay
    failures: list[str]


@dataclass(frozen=True)
class _Part:
    """A part of the CMake project that is built separately."""

    name: str
    folder: str
    targets: tuple[str, ...]
    products: tuple[str, ...]
    options: tuple[str, ...]


def deploy(lab: Lab, record: Record) -> Deployment:
    """Build and install all parts of the checkout."""
    programs, failures = collect(Path(record.rootfs), lab.deployed / "libexec")
    programs |= _builder()
    programs["vhpc-hookd"] = CHECKOUT / "hookd/vhpc-hookd"
    changed = _sync(programs, lab.deployed / "libexec")
    modules = package()
    stale: set[str] = set()
    if _sync(modules, lab.deployed / "python"):
        stale |= {"vhpcd", "vhpc-hookd"}
        _renew(lab.deployed / "python/__init__.py")
    if "vhpc.so" in changed:
        stale.add("slurmd")
    return Deployment(stale, failures)


def collect(
    rootfs: Path, installed: Path | None = None, toolchain: Path | None = None
) -> tuple[dict[str, Path], list[str]]:
    """Build the files of /usr/libexec/vhpc; return them by name, and the failures.

    Args:
        rootfs: system tree whose Slurm the plugin is for.
        installed: folder with the programs that are kept if their part cannot be built.
        toolchain: file of CMake, if the tree is for another machine than this one.
    """
    programs = _hooks()
    failures = []
    for part in _parts(rootfs, toolchain):
        try:
            programs.update(_build(part))
        except LabError as err:
            failures.append(str(err))
            kept = {name: installed / name for name in part.products} if installed is not None else {}
            programs.update({name: path for name, path in kept.items() if path.exists()})
    return programs, failures


def package() -> dict[str, Path]:
    """Files of the Python package by their relative names."""
    root = CHECKOUT / "python/vhpc_slurm"
    modules = {
        str(path.relative_to(root)): path
        for path in root.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    if not modules:
        say(f"skipping the Python package: {root} does not exist yet")
    return modules


def _builder() -> dict[str, Path]:
    """The image builder, for `vhpc image build`."""
    top = CHECKOUT / "vmimages"
    found = [path for path in top.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return {str(path.relative_to(CHECKOUT)): path for path in found}


def _parts(rootfs: Path, toolchain: Path | None) -> tuple[_Part, ...]:
    guest = (
        *("vhpc-run", "vhpc-shim", "vhpc-locks", "vhpc-sbcast", "vhpc-confine"),
        *("vhpc-measure", "vhpc-measure-mpi", "prolog-slurmctld", "epilog-slurmctld", "vhpc-node-hook"),
    )
    # loads only in the Slurm whose headers it was built with: one build folder per system tree
    folder = _build_folder(rootfs)
    headers = slurmtree.link_headers(rootfs, _BUILDS / folder / "slurm-headers")
    cross = (f"-DCMAKE_TOOLCHAIN_FILE={toolchain}",) if toolchain else ()
    options = (f"-DSLURM_INCLUDE_DIR={headers}", *cross)
    programs = f"programs-{toolchain.stem}" if toolchain else "programs"
    return (
        _Part("guest", programs, guest, guest, ("-DVHPC_SPANK=OFF", *cross)),
        _Part("spank_plugin", folder, ("vhpc_spank",), ("vhpc.so",), options),
    )


def _build_folder(rootfs: Path) -> str:
    """Name of the build folder for a tree, from the tree's path and its Slurm headers.

    Trees of two caches have the same name.  A tree that was removed and
    bootstrapped again may have a newer Slurm, with headers older than existing
    build results.
    """
    key = hashlib.sha256(str(rootfs.absolute()).encode())
    for header in sorted((slurmtree.prefix(rootfs) / "include/slurm").glob("*.h")):
        key.update(header.read_bytes())
    return f"plugin-{rootfs.name}-{key.hexdigest()[:8]}"


def _build(part: _Part) -> dict[str, Path]:
    if not (CHECKOUT / part.name / "CMakeLists.txt").exists():
        say(f"skipping {part.name}: it has no CMakeLists.txt yet")
        return {}
    build = _BUILDS / part.folder
    configure = [
        "cmake",
        "-G",
        "Ninja",
        "-S",
        str(CHECKOUT),
        "-B",
        str(build),
        "-DBUILD_TESTING=OFF",
        *part.options,
    ]
    compile_ = ["cmake", "--build", str(build), "--parallel", _BUILD_JOBS, "--target", *part.targets]
    # a configured build folder returns at once, and runs cmake itself if necessary
    configured = (build / "build.ninja").exists()
    with nullcontext() if configured else step(f"building {part.name}"):
        if not configured:
            _run(configure)
        _run(compile_)
    found = {name: path for name in part.products for path in build.rglob(name) if path.is_file()}
    missing = [name for name in part.products if name not in found]
    if missing:
        raise LabError(f"the build of {part.name} did not create {', '.join(missing)} under {build}")
    return found


def _run(command: list[str]) -> None:
    try:
        ended = subprocess.run(
            command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    except FileNotFoundError as err:
        raise LabError(f"{command[0]} is not installed; run: make deps") from err
    if ended.returncode:
        raise LabError(f"`{' '.join(command)}` ended with {ended.returncode}:\n{ended.stdout[-6000:]}")


def _hooks() -> dict[str, Path]:
    """Find the hooks: the executable files of prolog/ and epilog/."""
    hooks = {}
    for folder in ("prolog", "epilog"):
        for path in sorted((CHECKOUT / folder).glob("*")):
            if path.is_file() and os.access(path, os.X_OK):
                hooks[path.name] = path
    if not hooks:
        say("skipping the hooks: prolog/ and epilog/ have no executable file yet")
    return hooks


def _sync(files: dict[str, Path], target: Path) -> set[str]:
    """Make `target` have exactly these files (name -> source); return changed and removed names."""
    changed = set()
    for name, source in files.items():
        installed = target / name
        data = source.read_bytes()
        mode = 0o755 if os.access(source, os.X_OK) else 0o644
        try:
            if installed.read_bytes() == data and installed.stat().st_mode & 0o7777 == mode:
                continue
        except FileNotFoundError:
            installed.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        new = installed.with_name(f".{installed.name}.new")
        new.write_bytes(data)
        new.chmod(mode)
        # replaced by rename, so that a running program keeps its old file
        new.replace(installed)
        _drop_bytecode(installed)
        changed.add(name)
    for path in sorted(target.rglob("*"), reverse=True):
        name = str(path.relative_to(target))
        if path.is_file() and "__pycache__" not in path.parts and name not in files:
            path.unlink()
            _drop_bytecode(path)
            changed.add(name)
        elif path.is_dir() and path.name != "__pycache__" and not any(path.glob("[!_]*")):
            _drop_empty(path)
    return changed


def _renew(module: Path) -> None:
    """Replace a file by its copy, as package managers do: processes of hooks see a newer package."""
    new = module.with_name(f".{module.name}.new")
    shutil.copy2(module, new)
    new.replace(module)


def _drop_bytecode(module: Path) -> None:
    """Remove a module's bytecode, which Python uses if size and mtime in seconds are the same."""
    if module.suffix == ".py":
        for compiled in (module.parent / "__pycache__").glob(f"{module.stem}.*.pyc"):
            compiled.unlink()


def _drop_empty(folder: Path) -> None:
    remaining = [path for path in folder.iterdir() if path.name != "__pycache__"]
    if not remaining:
        shutil.rmtree(folder)
