# SPDX-License-Identifier: Apache-2.0
"""Reads the file systems of a disk in a guest, because kernels of hosts must not; runs in the sandbox.

QEMU runs with the rights of the user, without network and devices of the host. Its guest boots the
site's image for imports; ``diskreader.sh`` is its first process and writes a tar to a port, which
is a file here. Standard library only.
"""
# Decision: Disk images become file trees

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable
from importlib import resources
from pathlib import Path

from vhpc_slurm.architecture import X86_64, Architecture
from vhpc_slurm.bootfiles.newc import Archive
from vhpc_slurm.importing.tree import RefusedError

MEMORY_MIB = 1024
FILES, STATUS, CONSOLE = "files.tar", "status", "console"
READER = "diskreader.sh"
DONE = "done"
POLL_S = 0.2
REPORT_S = 5.0
TEXT_MAX = 4096


def read_files(
    disk: Path,
    boot: Path,
    cmdline: str,
    out: Path,
    max_bytes: int,
    step: Callable[[str], None],
    architecture: Architecture = X86_64,
) -> Path:
    """The files of a disk's systems as a tar.

    Args:
        disk: raw; the guest's kernel may write to it.
        boot: folder with ``kernel``, ``initrd`` and ``root`` of an image of the site.
        cmdline: kernel parameters of that image.
        out: folder to write into.
        max_bytes: limit of the tar.
        step: is told what is done.
        architecture: of the image of the site.

    Raises:
        RefusedError: the disk has no system that can be read, or too many bytes.
    """
    qemu = next(filter(shutil.which, architecture.programs), None)
    if qemu is None:
        raise RefusedError(
            f"{architecture.qemu}, which reads disk images, is not installed "
            f"(package {architecture.qemu_package})"
        )
    initrd = out / "reader.initrd"
    initrd.write_bytes((boot / "initrd").read_bytes() + _reader())
    step("reading the disk in a guest")
    tar = out / FILES
    with (
        (out / "qemu.log").open("xb") as log,
        subprocess.Popen(
            _command(qemu, disk, boot, cmdline, initrd, out, architecture),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        ) as run,
    ):
        _watch(run, tar, max_bytes, step)
    said = _tail(out / STATUS)
    if run.returncode != 0:
        raise RefusedError(f"QEMU ended with status {run.returncode}: {_tail(out / 'qemu.log')}")
    if not said:
        raise RefusedError(
            f"the guest that reads the disk ended early: {_tail(out / CONSOLE) or 'no output'}"
        )
    if said != DONE:
        raise RefusedError(said)
    return tar


def _reader() -> bytes:
    """An archive that puts the script in the place of the agent: later archives of an initrd win."""
    archive = Archive()
    script = resources.files(__package__).joinpath(READER).read_bytes()
    archive.file("vhpc-agent", script, 0o755)
    return archive.to_bytes()


def _command(
    qemu: str, disk: Path, boot: Path, cmdline: str, initrd: Path, out: Path, architecture: Architecture
) -> list[str]:
    own = f"console={architecture.console} panic=-1 quiet vhpc.root=/dev/vda vhpc.rootfstype=erofs"
    native = architecture.name == platform.machine()
    accelerator = "kvm" if native and os.access("/dev/kvm", os.W_OK) else "tcg"
    argv = [qemu, "-nodefaults", "-no-user-config", "-no-reboot", "-display", "none", "-monitor", "none"]
    argv += ["-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"]
    argv += ["-machine", f"{architecture.machine},accel={accelerator}", "-cpu", "max", "-m", str(MEMORY_MIB)]
    argv += ["-kernel", str(boot / "kernel"), "-initrd", str(initrd), "-append", f"{cmdline} {own}".strip()]
    for name, path, more in (("root", boot / "root", ",read-only=on"), ("disk", disk, ",cache=unsafe")):
        argv += ["-drive", f"file={path},format=raw,if=none,id={name}{more}"]
        argv += ["-device", f"virtio-blk-pci,drive={name}"]
    argv += ["-device", "virtio-serial-pci"]
    for name in (FILES, STATUS):
        argv += ["-chardev", f"file,id={name},path={out / name}"]
        argv += ["-device", f"virtserialport,chardev={name},name={name}"]
    return [*argv, "-serial", f"file:{out / CONSOLE}"]


def _watch(run: subprocess.Popen[bytes], tar: Path, max_bytes: int, step: Callable[[str], None]) -> None:
    """Wait for the guest's end; end it when its tar is too large. The sandbox has a deadline."""
    reported = time.monotonic()
    while run.poll() is None:
        time.sleep(POLL_S)
        size = tar.stat().st_size if tar.exists() else 0
        if size > max_bytes:
            run.kill()
            raise RefusedError(f"it has more than {max_bytes >> 20} MiB of files")
        if time.monotonic() - reported >= REPORT_S:
            reported = time.monotonic()
            step(f"{size >> 20} MiB read")


def _tail(path: Path) -> str:
    """The last line of a file that a guest wrote."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TEXT_MAX))
            lines = file.read(TEXT_MAX).decode("utf-8", "replace").split("\n")
    except FileNotFoundError:
        return ""
    kept = ["".join(char for char in line if char.isprintable()).strip() for line in lines]
    return next((line[:300] for line in reversed(kept) if line), "")
