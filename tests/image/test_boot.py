# SPDX-License-Identifier: Apache-2.0
"""Built images boot, in QEMU, and a guest that cannot boot says why and is off at once.

The first run downloads Debian packages; later ones take the base from the builder's cache.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from image_boot import QEMU, Boot, Image, boot, build

from pace import limit

# A guest that hangs instead of switching itself off never ends; one that boots takes 1.5 to 2 s when idle.
OFF_S = limit(60)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(QEMU is None, reason="apt-get install qemu-system-x86"),
]


@pytest.fixture(scope="module", params=["debian-minimal", "debian12-minimal"])
def image(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, standin: Path, init: Path
) -> Image:
    return build(request.param, tmp_path_factory.mktemp("catalog"), standin, init)


@pytest.fixture(scope="module")
def booted(image: Image) -> Boot:
    return boot(image)


def test_the_agent_starts(booted: Boot) -> None:
    assert booted.started_s is not None


def test_the_console_is_empty_before_the_agent(booted: Boot) -> None:
    assert booted.lines[0].startswith("standin: started")


def test_the_root_is_an_overlay_with_kernel_filesystems_and_run(booted: Boot) -> None:
    mounts = {line.split()[1]: line.split()[2] for line in booted.said("mount")}
    kernel = {"/dev": "devtmpfs", "/proc": "proc", "/sys": "sysfs"}
    assert mounts == {"/": "overlay", "/run": "tmpfs", "/dev/shm": "tmpfs", **kernel}
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
        ("vhpc.rootfstype=nofs", r"cannot mount /dev/dm-0: the kernel does not know file system type nofs"),
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
    assert done.seconds < OFF_S


def test_a_damaged_root_is_reported(image: Image, tmp_path: Path) -> None:
    disk = tmp_path / "root"
    disk.write_bytes(bytes(1 << 20))
    assert any(
        line.startswith("vhpc-init: cannot mount /dev/vda as erofs at /lower: Invalid argument")
        for line in boot(image, disk=disk, without="vhpc.verity=").lines
    )


@pytest.mark.promise("import.container")
def test_two_builds_give_the_same_digest(
    tmp_path: Path, standin: Path, init: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    made = [
        build("debian-minimal", tmp_path / f"catalog{n}", standin, init, "--cache", tmp_path / f"cache{n}")
        for n in range(2)
    ]
    assert made[0].raw == made[1].raw, "the digest is that of these bytes"
    assert made[0].manifest["provenance"]["created"] == "2023-11-14T22:13:20Z"
