# SPDX-License-Identifier: Apache-2.0
"""The kernel that a source brings itself, and an initrd for it; runs in the sandbox.

The initrd has vhpc-init and the agent of an image of the site, and modules of the source's kernel.
Standard library only.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path, PurePosixPath
from typing import Any

from vhpc_slurm.architecture import AARCH64, X86_64, Architecture
from vhpc_slurm.bootfiles import armkernel, newc
from vhpc_slurm.bootfiles.errors import BootFileError
from vhpc_slurm.bootfiles.initrd import initrd as make_initrd
from vhpc_slurm.bootfiles.modules import MORE_LISTS, SUFFIX, LoadStep, ModuleTree, initrd_files, load_lists
from vhpc_slurm.importing.tree import Node, RefusedError, Tree, parts

MODULES = "usr/lib/modules"
MODULES_OLD = "lib/modules"
"""Where systems without a merged /usr have them."""
TABLES = ("modules.dep", "modules.softdep", "modules.alias", "modules.builtin")
NEEDED = ("virtio_pci", "virtio_blk", "virtio_console", "virtio_net", "virtiofs", "erofs", "overlay")
"""Drivers without which no guest works: its root, its devices, and shared folders."""
GPU_DRIVERS = ("nvidia", "amdgpu", "i915", "xe")
INITS = ("usr/lib/systemd/systemd", "lib/systemd/systemd")
FILE_MAX = 512 << 20
"""Maximum bytes of a kernel, a module or a table."""
EPOCH = 0
HEADER_MAGIC = slice(0x202, 0x206)
"""Linux Documentation/arch/x86/boot.rst."""
CONTENT_CHUNK = 1 << 20


def take(
    tree: Tree, tars: list[Path], initrd: Path, out: Path, architecture: Architecture = X86_64
) -> dict[str, Any]:
    """Write ``kernel`` and ``initrd`` into a folder.

    Args:
        tree: the files of the source.
        tars: their contents.
        initrd: that of an image of the site.
        out: the folder; gets a folder ``modules`` too.
        architecture: of the source.

    Returns:
        what the manifest says of them: ``init``, ``drivers``, ``kernel_release``, and whether the
        kernel knows ``verity``.

    Raises:
        RefusedError: the source has no kernel that can boot as a guest, or no systemd.
    """
    init = next((path for path in INITS if (node := tree.find(path)) and node.content), "")
    if not init:
        raise RefusedError("it has no systemd, which has to start the guest agent")
    top, release, image = newest(tree)
    kernel = _bootable(read(image, tars, f"the kernel {release}"), release, architecture)
    folder = out / "modules" / release
    folder.mkdir(parents=True)
    for name in TABLES:
        if node := tree.find(f"{top}/{release}/{name}"):
            (folder / name).write_bytes(read(node, tars, name))
    site = newc.files(initrd.read_bytes())
    try:
        modules = ModuleTree.read(folder)
        lists = _lists(site, modules)
        for step in itertools.chain(*lists.values()):
            _extract(step, tree, tars, folder, f"{top}/{release}")
        found = initrd_files(lists)
        drivers = _drivers(modules, tree, tars, f"{top}/{release}")
    except BootFileError as err:
        raise RefusedError(f"its kernel {release} cannot be used: {err}") from err
    except RecursionError:
        raise RefusedError(f"its kernel {release} has modules that need each other endlessly") from None
    (out / "kernel").write_bytes(kernel)
    (out / "initrd").write_bytes(make_initrd(site["init"], site["vhpc-agent"], found, EPOCH))
    return {
        "init": f"/{init}",
        "drivers": drivers,
        "kernel_release": release,
        "verity": "verity" in lists,
    }


def _bootable(kernel: bytes, release: str, architecture: Architecture) -> bytes:
    """The kernel as QEMU starts it; RefusedError if it is not for this architecture."""
    if architecture is AARCH64:
        try:
            return armkernel.image(kernel)
        except BootFileError as err:
            raise RefusedError(f"its kernel {release} cannot be used: {err}") from err
    if kernel[HEADER_MAGIC] != b"HdrS":
        raise RefusedError(f"its kernel {release} is not a bzImage for x86-64")
    return kernel


def newest(tree: Tree) -> tuple[str, str, Node]:
    """The newest kernel that has modules; RefusedError if there is none.

    Returns:
        the folder of all modules, the kernel's release, and its file.
    """
    found = []
    for top in (MODULES, MODULES_OLD):
        node = tree.find(top)
        for release, child in sorted((node.children or {}).items()) if node else ():
            if child.children is None or tree.find(f"{top}/{release}/modules.dep") is None:
                continue
            for path in (f"{top}/{release}/vmlinuz", f"boot/vmlinuz-{release}"):
                image = tree.find(path)
                if image is not None and image.content is not None:
                    found.append((_version(release), top, release, image))
                    break
        if found:
            break
    if not found:
        raise RefusedError(f"it has no kernel: no folder of /{MODULES} has a modules.dep and a vmlinuz")
    _, top, release, image = max(found, key=lambda one: one[0])
    return top, release, image


def _version(release: str) -> list[tuple[int, str]]:
    """Numbers count as numbers: 6.12.9 is older than 6.12.10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"([0-9]{1,18})", release)]


def _lists(site: dict[str, bytes], modules: ModuleTree) -> dict[str, list[LoadStep]]:
    """Modules that the site's initrd loads, as far as this kernel has them, and those that every guest
    needs."""
    lines = site.get("modules/load", b"").decode().split()
    wanted = [SUFFIX.sub("", line.removeprefix("-")) for line in lines]
    more = {name: one for name, one in MORE_LISTS.items() if all(map(modules.has, one.modules))}
    return load_lists(modules, (*NEEDED, *filter(modules.has, wanted)), more)


def _drivers(modules: ModuleTree, tree: Tree, tars: list[Path], top: str) -> dict[str, str]:
    """Drivers of GPUs with their versions."""
    found = {}
    for name in GPU_DRIVERS:
        if modules.has(name):
            for step in modules.load_order((name,)):
                _extract(step, tree, tars, modules.folder, top)
            found[name] = modules.version(name)
    return found


def _extract(step: LoadStep, tree: Tree, tars: list[Path], folder: Path, top: str) -> None:
    """Write a module from the source to where ``ModuleTree`` reads it."""
    if not step.path.is_relative_to(folder):
        raise RefusedError(f"modules.dep names {str(step.path)!r}, which is not a module of its kernel")
    name = "/".join(parts(str(step.path.relative_to(folder))))
    target = folder / PurePosixPath(name)
    if target.exists():
        return
    node = tree.find(f"{top}/{name}")
    if node is None:
        raise RefusedError(f"its kernel lacks the module {name}, which modules.dep names")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(read(node, tars, name))


def read(node: Node, tars: list[Path], what: str) -> bytes:
    """The content of a file of a source.

    Raises:
        RefusedError: it is no regular file, or too large.
    """
    content = node.content
    if content is None:
        raise RefusedError(f"{what} is not a regular file")
    if content.size > FILE_MAX:
        raise RefusedError(f"{what} has more than {FILE_MAX >> 20} MiB")
    data = bytearray(content.size)
    source = tars[content.source] if isinstance(content.source, int) else Path(content.source)
    with source.open("rb") as file:
        for offset, position, length in content.pieces:
            file.seek(position)
            piece = file.read(length)
            if len(piece) != length:
                raise RefusedError(f"{what} became shorter while it was read")
            data[offset : offset + length] = piece
    return bytes(data)
