# SPDX-License-Identifier: Apache-2.0
"""mtty, the kernel's sample driver for mediated devices, for the hardware lab's machine.

Debian's kernels do not contain samples/vfio-mdev, but its package of the source does.  There mtty makes a
device of its own the parent; here a PCI function is the parent, as with the drivers of GPUs.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from pathlib import Path

from vlablib import rootfs
from vlablib.recipe import Suite
from vlablib.report import LabError, step

PARENT = "0000:23:01.0"
_REGISTERS = "mdev_register_parent(&mtty_dev.parent, &mtty_dev.dev,"
_MAKEFILE = "obj-m := mtty.o\n"


def _with_parent(source: str) -> str:
    """mtty's source, with PARENT as the parent."""
    if source.count(_REGISTERS) != 1:
        raise LabError(f"mtty.c of this kernel does not contain {_REGISTERS!r}; adapt lab/vlablib/mtty.py")
    domain, bus, slot, function = (int(part, 16) for part in re.split("[:.]", PARENT))
    parent = f"&pci_get_domain_bus_and_slot({domain}, {bus}, PCI_DEVFN({slot}, {function}))->dev"
    return source.replace(_REGISTERS, _REGISTERS.replace("&mtty_dev.dev", parent))


def module(cache: Path, machine: Path) -> Path:
    """The module for the kernel of the machine's tree; it is built once for each kernel.

    Raises:
        LabError: the packages cannot be installed, or it cannot be built.
    """
    (kernel,) = machine.glob("boot/vmlinuz-*")
    release = kernel.name.removeprefix("vmlinuz-")
    digest = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    built = cache / f"mtty-{release}-{digest}.ko"
    if not built.exists():
        with step(f"building mtty for Linux {release} (once; 3 minutes)"):
            _build(built, release)
    return built


def _build(target: Path, release: str) -> None:
    series = re.match(r"\d+\.\d+", release)
    assert series is not None, "Debian's releases begin so"
    packages = ("gcc", "make", f"linux-headers-{release}", f"linux-source-{series[0]}")
    tree = target.with_suffix(".tree")
    rootfs.remove(tree)
    try:
        rootfs.bare(tree, Suite("mtty", packages, archive="trixie", common=()))
        _compile(tree, release, series[0])
        shutil.copyfile(tree / "mtty/mtty.ko", target.with_suffix(".partial"))
        target.with_suffix(".partial").rename(target)
    finally:
        rootfs.remove(tree)


def _compile(tree: Path, release: str, series: str) -> None:
    folder, member = tree / "mtty", f"linux-source-{series}/samples/vfio-mdev/mtty.c"
    folder.mkdir()
    source = rootfs.run("tar", "-xJOf", str(tree / f"usr/src/linux-source-{series}.tar.xz"), member)
    (folder / "mtty.c").write_text(_with_parent(source), encoding="utf-8")
    (folder / "Makefile").write_text(_MAKEFILE, encoding="utf-8")
    headers = f"/usr/src/linux-headers-{release}"
    rootfs.run("chroot", str(tree), "make", "-s", "-C", headers, "M=/mtty", "modules")
