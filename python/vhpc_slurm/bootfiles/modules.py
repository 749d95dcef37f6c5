# SPDX-License-Identifier: Apache-2.0
"""Kernel modules for an initrd: selection, load order and decompression.

Reads the files of depmod(8) (modules.dep, modules.softdep, modules.alias,
modules.builtin) as modprobe(8) does, so that vhpc-init needs neither program.
"""

from __future__ import annotations

import fnmatch
import gzip
import lzma
import re
import shutil
import subprocess
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from types import MappingProxyType

from vhpc_slurm.bootfiles import elf
from vhpc_slurm.bootfiles.errors import BootFileError

VERSION_LENGTH = 128
UNPACK_TIMEOUT_S = 60
SUFFIX = re.compile(r"\.ko(\.(xz|zst|gz))?$")


def canonical(name: str) -> str:
    """A module's name as the kernel spells it, with '_' for '-'."""
    return name.replace("-", "_")


def module_name(path: str) -> str:
    """The name of a module's file, as the kernel spells it."""
    return canonical(SUFFIX.sub("", PurePosixPath(path).name))


@dataclass(frozen=True)
class LoadStep:
    """A module to load; an optional one (a soft dependency, such as a driver for some CPUs) may fail."""

    path: Path
    optional: bool


@dataclass(frozen=True)
class ModuleList:
    """Modules that are loaded together. ``optional``: come first, as far as the kernel has them; may fail."""

    modules: tuple[str, ...]
    optional: tuple[str, ...] = ()


MORE_LISTS = MappingProxyType(
    {"disk": ModuleList(("ext4",)), "verity": ModuleList(("dm_verity",), optional=("crypto-sha256",))}
)
"""For guests with a disk of their own (node.store.disks makes it), and with a hash tree of the root: its hash
by an alias, since each processor has some of the drivers, and the kernel takes the fastest that is loaded."""


@dataclass
class ModuleTree:
    """``/lib/modules/RELEASE`` of one kernel."""

    folder: Path
    _files: dict[str, str] = field(default_factory=dict)
    _needs: dict[str, list[str]] = field(default_factory=dict)
    _pre: dict[str, list[str]] = field(default_factory=dict)
    _post: dict[str, list[str]] = field(default_factory=dict)
    _builtin: set[str] = field(default_factory=set)
    _aliases: list[tuple[str, str]] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> ModuleTree:
        """Read depmod's tables; BootFileError if they are missing."""
        tree = cls(folder)
        for line in tree._lines("modules.dep", required=True):
            path, _, needs = line.partition(":")
            tree._files[module_name(path)] = path
            # depmod lists direct and indirect dependencies; the last one must be loaded first.
            tree._needs[module_name(path)] = [module_name(p) for p in reversed(needs.split())]
        tree._builtin = {module_name(line) for line in tree._lines("modules.builtin", required=False)}
        for line in tree._lines("modules.softdep", required=False):
            tree._read_softdep(line.split())
        for line in tree._lines("modules.alias", required=False):
            words = line.split()
            if len(words) == 3 and words[0] == "alias":
                tree._aliases.append((canonical(words[1]), canonical(words[2])))
        return tree

    def has(self, name: str) -> bool:
        """Whether the kernel has a module or a built-in module of that name."""
        return canonical(name) in self._files or canonical(name) in self._builtin

    def version(self, name: str) -> str:
        """The version that a module states (modinfo -F version); empty if it states none, or is built in.

        Modules of the kernel's own source tree seldom state one; those of vendors, such as GPU drivers, do.
        """
        path = self._files.get(canonical(name))
        if path is None:
            return ""
        try:
            found = elf.section(read_module(self.folder / path), ".modinfo")
        except ValueError as err:
            raise BootFileError(f"cannot read kernel module {path}", str(err)) from err
        for item in found.split(b"\0"):
            if item.startswith(b"version="):
                return item.removeprefix(b"version=").decode("ascii", "replace")[:VERSION_LENGTH]
        return ""

    def load_order(self, names: tuple[str, ...], optional: tuple[str, ...] = ()) -> list[LoadStep]:
        """The named modules and all their dependencies, each module after its dependencies.

        Args:
            names: modules.
            optional: modules or aliases that are loaded first, as far as the kernel has them; they may fail.

        Raises:
            BootFileError: the kernel has no such module.
        """
        order: dict[str, bool] = {}
        for name in optional:
            self._add_soft(canonical(name), order, ())
        for name in names:
            if not self.has(name):
                raise BootFileError(f"kernel {self.folder.name} has no module {name}")
            self._add(canonical(name), order, ())
        return [LoadStep(self.folder / self._files[name], optional) for name, optional in order.items()]

    def _add(
        self, name: str, order: dict[str, bool], above: tuple[str, ...], *, optional: bool = False
    ) -> None:
        """Add a module to ``order``, which maps a name to whether it may fail."""
        if name in above or name not in self._files:
            return  # a cycle of soft dependencies, or built in
        if name in order and (optional or not order[name]):
            return  # already added, with the same or a stronger need
        for soft in self._pre.get(name, ()):
            self._add_soft(soft, order, (*above, name))
        for needed in self._needs[name]:
            self._add(needed, order, (*above, name), optional=optional)
        order[name] = optional
        for soft in self._post.get(name, ()):
            self._add_soft(soft, order, (*above, name))

    def _add_soft(self, name: str, order: dict[str, bool], above: tuple[str, ...]) -> None:
        """Add a soft dependency: a module or an alias, which may be missing or fail to load."""
        if self.has(name):
            self._add(name, order, above, optional=True)
            return
        for pattern, module in self._aliases:
            if fnmatch.fnmatchcase(name, pattern):
                self._add(module, order, above, optional=True)

    def _read_softdep(self, words: list[str]) -> None:
        if len(words) < 2 or words[0] != "softdep":
            return
        target: list[str] = []
        for word in words[2:]:
            if word == "pre:":
                target = self._pre.setdefault(canonical(words[1]), [])
            elif word == "post:":
                target = self._post.setdefault(canonical(words[1]), [])
            else:
                target.append(canonical(word))

    def _lines(self, name: str, *, required: bool) -> list[str]:
        try:
            lines = (self.folder / name).read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            if required:
                raise BootFileError(f"{self.folder} has no {name}", "depmod did not run") from None
            return []
        except UnicodeDecodeError as err:
            raise BootFileError(f"cannot read {name} of kernel {self.folder.name}", str(err)) from err
        return [line for line in lines if line and not line.startswith("#")]


def file_name(path: Path) -> str:
    """Name of a module's uncompressed file."""
    return SUFFIX.sub(".ko", path.name)


def load_lists(
    tree: ModuleTree, always: tuple[str, ...], more: Mapping[str, ModuleList] = MORE_LISTS
) -> dict[str, list[LoadStep]]:
    """The lists that vhpc-init reads, by their names: ``load`` for every guest, and those of ``more``.

    Raises:
        BootFileError: a module is missing.
    """
    first = tree.load_order(always)
    found = {"load": first}
    for name, wanted in more.items():
        steps = tree.load_order(wanted.modules, wanted.optional)
        found[name] = [step for step in steps if step not in first]
    return found


def initrd_files(lists: dict[str, list[LoadStep]]) -> dict[str, bytes]:
    """Files of an initrd's ``/modules``: the lists, and the modules in them, uncompressed.

    Raises:
        BootFileError: a module is damaged.
    """
    found = {name: load_list(steps).encode() for name, steps in lists.items()}
    for steps in lists.values():
        found |= {file_name(step.path): read_module(step.path) for step in steps}
    return found


def load_list(steps: list[LoadStep]) -> str:
    """Text of the initrd's ``/modules/load``: one file name per line, with a prefix '-' if optional."""
    return "".join(f"{'-' if step.optional else ''}{file_name(step.path)}\n" for step in steps)


def read_module(path: Path) -> bytes:
    """A module's bytes, uncompressed: the kernel of Debian 12 cannot decompress modules itself.

    Raises:
        BootFileError: the file is damaged, or zstd is needed and not installed.
    """
    raw = path.read_bytes()
    try:
        if path.suffix == ".xz":
            return lzma.decompress(raw)
        if path.suffix == ".gz":
            return gzip.decompress(raw)
    except (lzma.LZMAError, EOFError, zlib.error, gzip.BadGzipFile) as err:
        raise BootFileError(f"cannot unpack kernel module {path.name}", str(err)) from err
    return _unzstd(raw, path.name) if path.suffix == ".zst" else raw


def _unzstd(raw: bytes, name: str) -> bytes:
    zstd = shutil.which("zstd")
    if zstd is None:
        raise BootFileError(f"cannot unpack kernel module {name}", "zstd is not installed")
    try:
        done = subprocess.run(
            [zstd, "-dc"], input=raw, capture_output=True, check=True, timeout=UNPACK_TIMEOUT_S
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as err:
        why = (err.stderr or b"").decode(errors="replace").strip()
        raise BootFileError(f"cannot unpack kernel module {name}", why or "zstd failed") from err
    return done.stdout
