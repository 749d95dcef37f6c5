# SPDX-License-Identifier: Apache-2.0
"""Recipes: descriptions of images in TOML.

A recipe has the tables ``image``, ``debian``, ``kernel`` and ``root``; each is
a class in this module.  An unknown key or a wrong type is an error.
``docs/image-format.md`` explains the keys.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import tomllib
import typing
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from vhpc_slurm.architecture import X86_64, Architecture, named, own
from vmimages.errors import BuildError
from vmimages.mirrors import Mirrors, sources

# Copies from vhpc_slurm.model, which a build host may not have.
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}", re.ASCII)
TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}", re.ASCII)
# The node sets these kernel parameters; vhpc refuses a manifest that has one (vhpc_slurm.catalog.manifest).
RESERVED_PARAMETERS = frozenset(
    {
        "init",
        "rdinit",
        "initrd",
        "root",
        "rootfstype",
        "rootflags",
        "vhpc.agent.disk",
        "vhpc.disk",
        "vhpc.init",
        "vhpc.root",
        "vhpc.rootfstype",
        "vhpc.verity",
    }
)
PACKAGE = re.compile(r"[a-z0-9][a-z0-9+.-]+", re.ASCII)
MODULE = re.compile(r"[A-Za-z0-9_-]+", re.ASCII)
MAX_CPUS = 4096
# Of kernel.package: becomes Debian's name of the architecture.
DEBIAN_ARCH = "{arch}"
# Increase it if bases from the cache of an older builder must not be used.
BASE_FORMAT = 5
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class ImageTable:
    """``[image]``: fields of the manifest."""

    name: str
    # after ``load`` never empty
    arch: str = ""
    tag: str = "latest"
    description: str = ""
    min_memory_mib: int
    min_cpus: int = 1
    firmware: str = "bios"
    init: str = "agent"
    drivers: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class DebianTable:
    """``[debian]``: release, mirrors and packages."""

    suite: str
    # empty: the mirrors of the build host's APT configuration
    mirror: str = ""
    security_mirror: str = ""
    components: tuple[str, ...] = ("main",)
    packages: tuple[str, ...] = ()
    exclude_paths: tuple[str, ...] = ()
    include_paths: tuple[str, ...] = ()

    def sources(self) -> list[str]:
        """Lines of sources.list; the mirrors must be set."""
        return sources(self.suite, Mirrors(self.mirror, self.security_mirror), self.components)


@dataclass(frozen=True, kw_only=True)
class KernelTable:
    """``[kernel]``: package, command line and modules."""

    package: str
    format: str = "vmlinux"
    cmdline: str = ""
    modules: tuple[str, ...] = ()
    modules_in_root: bool = True


@dataclass(frozen=True, kw_only=True)
class RootTable:
    """``[root]``: how the root file system is written."""

    format: str = "erofs"
    compression: str = "lz4hc"
    uuid: str
    source_date_epoch: int


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A whole recipe."""

    image: ImageTable
    debian: DebianTable
    kernel: KernelTable
    root: RootTable

    @property
    def architecture(self) -> Architecture:
        """Of the image."""
        return named(self.image.arch)

    def base_key(self) -> str:
        """Digest of all inputs of a base (root, kernel, modules): equal keys, equal base."""
        parts = dataclasses.asdict(self)
        parts["image"] = self.image.drivers  # the build checks that the base has them
        if self.architecture is not X86_64:
            parts["arch"] = self.image.arch
        del parts["kernel"]["cmdline"]
        text = json.dumps([BASE_FORMAT, parts, steps(FINISH_SCRIPT)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


FINISH_SCRIPT = Path(__file__).with_name("finish.sh")


def steps(script: Path) -> str:
    """A script's text for cache keys, without its license line, which does not change the result."""
    return script.read_text(encoding="utf-8").replace("# SPDX-License-Identifier: Apache-2.0\n", "", 1)


def load(path: Path, arch: str = "") -> Recipe:
    """Read and check a recipe.

    Args:
        path: its file.
        arch: architecture of the image; empty: the recipe's, else this host's.

    Raises:
        BuildError: unreadable, not TOML, or not a recipe; names the key.
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as err:
        raise BuildError(f"cannot read recipe {path}", str(err)) from err
    try:
        recipe = _for(arch, _convert(raw, Recipe, ""))
        _check(recipe)
    except ValueError as err:
        raise BuildError(f"{path} is not a valid recipe", str(err), "see docs/image-format.md") from err
    return recipe


def _for(arch: str, recipe: Recipe) -> Recipe:
    """The recipe for one architecture; ValueError if guests cannot have it."""
    wanted = arch or recipe.image.arch
    found = named(wanted) if wanted else own()
    package = recipe.kernel.package.replace(DEBIAN_ARCH, found.debian)
    return replace(
        recipe,
        image=replace(recipe.image, arch=found.name),
        kernel=replace(recipe.kernel, package=package),
    )


def _convert(raw: Any, kind: type[T], where: str) -> T:
    """Convert a TOML table to a dataclass; ValueError with the key's name."""
    if not isinstance(raw, dict):
        raise ValueError(f"{where.rstrip('.')} must be a table")
    hints = typing.get_type_hints(kind)
    fields = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    unknown = sorted(set(raw) - set(fields))
    if unknown:
        raise ValueError(f"unknown key {where}{unknown[0]}")
    for name, item in fields.items():
        if item.default is dataclasses.MISSING and name not in raw:
            raise ValueError(f"{where}{name} is missing")
    return kind(**{name: _value(value, hints[name], where + name) for name, value in raw.items()})


def _value(value: Any, kind: Any, where: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return _convert(value, typing.cast(type[Any], kind), where + ".")
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ValueError(f"{where} must be a list of strings")
        return tuple(value)
    if type(value) is not kind:
        raise ValueError(f"{where} must be of type {kind.__name__}")
    return value


def _check(recipe: Recipe) -> None:
    image, debian, kernel, root = recipe.image, recipe.debian, recipe.kernel, recipe.root
    rules = (
        (NAME.fullmatch(image.name), f"image.name {image.name!r} contains a character that is not allowed"),
        (TAG.fullmatch(image.tag), f"image.tag {image.tag!r} contains a character that is not allowed"),
        (image.min_memory_mib > 0, "image.min_memory_mib must be above 0"),
        (0 < image.min_cpus <= MAX_CPUS, f"image.min_cpus must be from 1 to {MAX_CPUS}"),
        (image.firmware in {"bios", "uefi"}, "image.firmware must be bios or uefi"),
        (image.init == "agent" or image.init.startswith("/"), "image.init must be agent or an absolute path"),
        (kernel.format in {"vmlinux", "bzImage"}, "kernel.format must be vmlinux or bzImage"),
        (
            image.firmware == "bios" or kernel.format == "bzImage",
            'image.firmware = "uefi" needs kernel.format = "bzImage": UEFI does not load an ELF kernel',
        ),
        ('"' not in kernel.cmdline, "kernel.cmdline must not contain quotation marks"),
        (root.format == "erofs", "root.format must be erofs"),
        (root.compression in {"none", "lz4", "lz4hc"}, "root.compression must be none, lz4 or lz4hc"),
        (_is_uuid(root.uuid), f"root.uuid {root.uuid!r} is not a UUID"),
        (root.source_date_epoch >= 0, "root.source_date_epoch must not be negative"),
    )
    for holds, message in rules:
        if not holds:
            raise ValueError(message)
    for word in kernel.cmdline.split():
        if word == "--" or word.partition("=")[0] in RESERVED_PARAMETERS:
            raise ValueError(f"kernel.cmdline must not contain {word}: the node sets it (or image.init does)")
    for what, pattern, names in (
        ("debian.packages", PACKAGE, debian.packages),
        ("kernel.package", PACKAGE, (kernel.package,)),
        ("debian.suite", NAME, (debian.suite,)),
        ("kernel.modules", MODULE, kernel.modules),
        ("image.drivers", MODULE, image.drivers),
    ):
        for name in names:
            if not pattern.fullmatch(name):
                raise ValueError(f"{what}: {name!r} is not a valid name")


def _is_uuid(text: str) -> bool:
    try:
        return str(uuid.UUID(text)) == text
    except ValueError:
        return False
