# SPDX-License-Identifier: Apache-2.0
"""Built images boot, in QEMU, and a guest that cannot boot says why and is off at once.

The first run downloads Debian packages; later ones take the base from the builder's cache.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

CHECKOUT = Path(__file__).parents[2]
QEMU = shutil.which("qemu-system-x86_64")
# QEMU's start to the agent under software emulation: 1.5 to 2 s on an idle machine, more on a busy one.
AGENT_STARTED_S = float(os.environ.get("VHPC_TEST_BOOT_S", "8"))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(QEMU is None, reason="apt-get install qemu-system-x86"),
]


@dataclass(frozen=True)
class Image:
    catalog: Path
    manifest: dict[str, Any]

    def blob(self, field: str) -> Path:
        return self.catalog / f"blobs/sha256/{self.manifest[field]['sha256']}"


@dataclass(frozen=True)
class Boot:
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
    return Image(catalog, json.loads((catalog / f"manifests/sha256/{digest}.json").read_text()))


@pytest.fixture(scope="module", params=["debian-minimal", "debian12-minimal"])
def image(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, standin: Path, init: Path
) -> Image:
    return build(request.param, tmp_path_factory.mktemp("catalog"), standin, init)


def boot(image: Image, words: str = "", memory_mib: int = 512, disk: Path | None = None) -> Boot:
    """Boot as a guest is booted, but for libvirt; ``words`` are last on the kernel's command line."""
    assert QEMU is not None
    fixed = "console=ttyS0 panic=-1 quiet vhpc.root=/dev/vda vhpc.rootfstype=erofs"
    cmdline = f"{image.manifest['cmdline']} {fixed} {words}"
    argv = [
        *(QEMU, "-M", "q35,accel=tcg", "-cpu", "max", "-smp", "1", "-m", str(memory_mib)),
        *("-nodefaults", "-display", "none", "-serial", "stdio", "-no-reboot"),
        *("-kernel", str(image.blob("kernel")), "-initrd", str(image.blob("initrd")), "-append", cmdline),
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


@pytest.fixture(scope="module")
def booted(image: Image) -> Boot:
    return boot(image)


def test_the_agent_starts_in_time(booted: Boot) -> None:
    assert booted.started_s is not None
    assert booted.started_s < AGENT_STARTED_S


def test_nothing_is_said_before_the_agent(booted: Boot) -> None:
    assert booted.lines[0].startswith("standin: started")


def test_the_root_is_an_overlay_with_kernel_filesystems_and_run(booted: Boot) -> None:
    mounts = {line.split()[1]: line.split()[2] for line in booted.said("mount")}
    assert mounts == {"/": "overlay", "/dev": "devtmpfs", "/proc": "proc", "/sys": "sysfs", "/run": "tmpfs"}
    assert booted.said("overlay") == ["writable"]
    assert booted.said("port") == ["yes"]


def test_the_root_keeps_modes_and_has_no_identity(booted: Boot) -> None:
    assert booted.said("modes") == ["1777 4755"]
    assert booted.said("machine-id") == ["0"]


def test_programs_run_and_modules_load(booted: Boot) -> None:
    assert booted.said("shell") == [f"status={7 << 8} 0"]
    assert booted.said("python") == ["status=0 42"]
    assert booted.said("modprobe")[0].startswith("status=0")


def test_it_boots_with_its_minimum_memory(image: Image) -> None:
    assert boot(image, memory_mib=image.manifest["min_memory_mib"]).said("python") == ["status=0 42"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("vhpc.root=/dev/vdb vhpc.rootwait=1", r"block device /dev/vdb did not appear within 1 s"),
        ("vhpc.rootfstype=nofs", r"cannot mount /dev/vda: the kernel does not know file system type nofs"),
        ("vhpc.init=/sbin/absent", r"cannot execute /sbin/absent of the image: No such file or directory"),
        ("vhpc.rootwait=soon", r"vhpc.rootwait=soon is not a number of seconds up to 600"),
        ("vhpc.overlay_size=nonsense", r"cannot mount tmpfs as tmpfs at /rw: Invalid argument"),
    ],
)
def test_a_guest_that_cannot_boot_says_why_and_is_off(image: Image, words: str, message: str) -> None:
    done = boot(image, words)
    ours = [line for line in done.lines if "vhpc-init:" in line]
    assert len(ours) == 1
    assert re.fullmatch(f"vhpc-init: {message}.*", ours[0])
    assert done.started_s is None
    assert done.seconds < AGENT_STARTED_S + 2


def test_a_damaged_root_is_said(image: Image, tmp_path: Path) -> None:
    disk = tmp_path / "root"
    disk.write_bytes(bytes(1 << 20))
    assert any(
        line.startswith("vhpc-init: cannot mount /dev/vda as erofs at /lower: Invalid argument")
        for line in boot(image, disk=disk).lines
    )


def test_two_builds_give_the_same_bytes(tmp_path: Path, standin: Path, init: Path) -> None:
    made = [
        build("debian-minimal", tmp_path / f"catalog{n}", standin, init, "--cache", tmp_path / f"cache{n}")
        for n in range(2)
    ]
    assert made[0].manifest | {"created": ""} == made[1].manifest | {"created": ""}
