# SPDX-License-Identifier: Apache-2.0
"""Builds images and boots them in QEMU, with the stand-in of tests/image/programs in the agent's place."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vhpc_slurm.catalog import decode_manifest
from vhpc_slurm.domain.boot import kernel_cmdline

CHECKOUT = Path(__file__).parents[2]
QEMU = shutil.which("qemu-system-x86_64")
TIMEOUT_S = 115


@dataclass(frozen=True)
class Image:
    """A published image, with its manifest's bytes."""

    catalog: Path
    raw: bytes

    @property
    def manifest(self) -> dict[str, Any]:
        fields: dict[str, Any] = json.loads(self.raw)
        return fields

    def blob(self, field: str) -> Path:
        return self.catalog / f"blobs/sha256/{self.manifest[field]['sha256']}"


@dataclass(frozen=True)
class Boot:
    """The console of a guest, and the start of its agent since QEMU's start."""

    lines: list[str]
    started_s: float | None
    seconds: float

    def said(self, key: str) -> list[str]:
        prefix = f"standin: {key} "
        return [line.removeprefix(prefix) for line in self.lines if line.startswith(prefix)]


def build(name: str, catalog: Path, standin: Path, init: Path, *extra: str | Path) -> Image:
    done = subprocess.run(
        [
            sys.executable,
            CHECKOUT / "vmimages/build",
            CHECKOUT / "vmimages/recipes" / f"{name}.toml",
            *("--output", catalog, "--agent", standin, "--init", init, "--json", *extra),
        ],
        check=True,
        capture_output=True,
        text=True,
    )
    digest = json.loads(done.stdout)["digest"].removeprefix("sha256:")
    return Image(catalog, (catalog / f"manifests/sha256/{digest}.json").read_bytes())


def boot(
    image: Image,
    words: str = "",
    memory_mib: int = 512,
    disk: Path | None = None,
    initrd: Path | None = None,
    without: str = "",
) -> Boot:
    """Boot as a guest is booted, but for libvirt.

    Args:
        image: what to boot.
        words: what is last on the kernel's command line.
        memory_mib: memory of the guest.
        disk: in place of the image's root.
        initrd: in place of the image's.
        without: a prefix; parameters that start with it are left out.
    """
    assert QEMU is not None
    lease = decode_manifest(image.raw)
    given = kernel_cmdline(lease.cmdline, lease.root_format).split()
    cmdline = " ".join([*(word for word in given if not without or not word.startswith(without)), words])
    argv = [
        *(
            "timeout",
            str(TIMEOUT_S),
            QEMU,
            "-M",
            "q35,accel=tcg",
            "-cpu",
            "max",
            "-smp",
            "1",
            "-m",
            str(memory_mib),
        ),
        *("-nodefaults", "-display", "none", "-serial", "stdio", "-no-reboot"),
        *(
            "-kernel",
            str(image.blob("kernel")),
            "-initrd",
            str(initrd or image.blob("initrd")),
            "-append",
            cmdline,
        ),
        *("-drive", f"file={disk or image.blob('root')},if=none,id=root,format=raw,readonly=on"),
        *("-device", "virtio-blk-pci,drive=root", "-device", "virtio-serial-pci"),
    ]
    begin = time.monotonic()
    lines: list[str] = []
    started = None
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as qemu:
        assert qemu.stdout is not None
        for raw in qemu.stdout:
            lines.append(raw.decode(errors="replace").strip())
            if lines[-1].startswith("standin: started"):
                started = time.monotonic() - begin
    assert qemu.returncode == 0
    return Boot(lines, started, time.monotonic() - begin)
