# SPDX-License-Identifier: Apache-2.0
"""Sources with a kernel of their own: which kernel, which modules, and an initrd that cpio made and reads."""

from __future__ import annotations

import gzip
import lzma
import subprocess
from pathlib import Path
from typing import Any

import pytest
from containers import entry, tar
from import_rig import applied

from vhpc_slurm.architecture import AARCH64
from vhpc_slurm.bootfiles import newc
from vhpc_slurm.bootfiles.errors import BootFileError
from vhpc_slurm.importing import ownkernel, taking
from vhpc_slurm.importing.tree import RefusedError

RELEASE = "6.12.10-1.el10.x86_64"
SITE = {
    "init": b"vhpc-init of the site",
    "vhpc-agent": b"agent of the site",
    "modules/load": b"virtio.ko\nvirtio_blk.ko\n-crc32c_old.ko\n",
    "modules/disk": b"crc16.ko\next4.ko\n",
}
DEPENDENCIES = {
    "virtio": (), "virtio_pci": ("virtio",), "virtio_blk": ("virtio",), "virtio_console": ("virtio",),
    "virtio_net": ("virtio",), "virtiofs": ("virtio",), "erofs": (), "overlay": (), "ext4": ("mbcache",),
    "mbcache": (),
}  # fmt: skip


def bzimage(text: bytes) -> bytes:
    """A file that a loader takes for a kernel (Linux, boot.rst): "HdrS" at 0x202."""
    return b"MZ" + bytes(0x200) + b"HdrS" + text


def modules_dep(names: dict[str, tuple[str, ...]]) -> str:
    return "".join(
        f"kernel/{name}.ko.xz:{''.join(f' kernel/{needed}.ko.xz' for needed in needs)}\n"
        for name, needs in names.items()
    )


def system(top: str = "usr/lib/modules", release: str = RELEASE, **changes: Any) -> list[Any]:
    """Entries of a tar with a kernel, its modules and systemd."""
    names = {name: needs for name, needs in DEPENDENCIES.items() if name != changes.get("without")}
    folder = f"{top}/{release}"
    return [
        (f"{folder}/modules.dep", changes.get("dep", modules_dep(names))),
        (f"{folder}/modules.builtin", changes.get("builtin", "")),
        *((f"{folder}/kernel/{name}.ko.xz", lzma.compress(name.encode())) for name in names),
        (changes.get("image", f"{folder}/vmlinuz"), changes.get("kernel", bzimage(release.encode()))),
        (changes.get("systemd", "usr/lib/systemd/systemd"), "the init"),
    ]


@pytest.fixture
def initrd(tmp_path: Path) -> Path:
    """The initrd of an image of the site, made by cpio."""
    top = tmp_path / "site"
    for name, data in SITE.items():
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_bytes(data)
    names = "\n".join(["modules", *SITE]).encode()
    made = subprocess.run(
        ["cpio", "-o", "-H", "newc", "--quiet"], input=names, cwd=top, capture_output=True, check=True
    )
    (tmp_path / "site.initrd").write_bytes(made.stdout)
    return tmp_path / "site.initrd"


def taken(tmp_path: Path, initrd: Path, *entries: Any) -> tuple[dict[str, Any], Path]:
    tree, tars = applied(tmp_path, tar(*entries))
    out = tmp_path / "out"
    out.mkdir()
    return ownkernel.take(tree, tars, initrd, out), out


def unpacked(path: Path) -> dict[str, bytes]:
    folder = path.with_name("unpacked")
    folder.mkdir()
    subprocess.run(
        ["cpio", "-i", "-d", "--quiet", "--no-preserve-owner", "-f", "dev/*"],
        input=path.read_bytes(), cwd=folder, check=True,
    )  # fmt: skip
    return {str(one.relative_to(folder)): one.read_bytes() for one in folder.rglob("*") if one.is_file()}


@pytest.mark.promise("import.disk")
def test_the_initrd_has_the_sites_agent_and_the_sources_modules(tmp_path: Path, initrd: Path) -> None:
    found, out = taken(tmp_path, initrd, *system())
    assert found == {
        "init": "/usr/lib/systemd/systemd",
        "drivers": {},
        "kernel_release": RELEASE,
        "verity": False,
    }
    assert (out / "kernel").read_bytes() == bzimage(RELEASE.encode())
    files = unpacked(out / "initrd")
    assert files["init"] == b"vhpc-init of the site"
    assert files["vhpc-agent"] == b"agent of the site"
    order = files["modules/load"].decode().split()
    assert order.index("virtio.ko") < order.index("virtio_blk.ko")
    assert {"erofs.ko", "overlay.ko", "virtiofs.ko"} < set(order)
    # the site's list has crc16, which this kernel has not
    assert files["modules/disk"].decode().split() == ["mbcache.ko", "ext4.ko"]
    assert files["modules/virtio_blk.ko"] == b"virtio_blk"
    assert set(order) <= {Path(name).name for name in files}


@pytest.mark.parametrize(
    "entries",
    [
        [(entry("lib", b"2", linkname="usr/lib"), ""), *system()],
        system("lib/modules", systemd="lib/systemd/systemd"),
        system(image=f"boot/vmlinuz-{RELEASE}"),
    ],
    ids=["merged /usr", "old layout", "kernel in /boot"],
)
def test_layouts_of_distributions(tmp_path: Path, initrd: Path, entries: list[Any]) -> None:
    found, out = taken(tmp_path, initrd, *entries)
    assert found["kernel_release"] == RELEASE
    assert found["init"].endswith("lib/systemd/systemd")
    assert (out / "kernel").read_bytes() == bzimage(RELEASE.encode())


def test_the_newest_kernel_with_modules_boots(tmp_path: Path, initrd: Path) -> None:
    found, _ = taken(
        tmp_path,
        initrd,
        *system(release="6.12.9-1"),
        *system(release="6.12.10-1"),
        *system(release="6.2.99-1"),
        ("usr/lib/modules/7.0.0-1/vmlinuz", bzimage(b"without modules")),
        ("usr/lib/modules/7.0.1-1/modules.dep", "without a kernel"),
    )
    assert found["kernel_release"] == "6.12.10-1"


def test_an_arm_system_boots_its_own_kernel_unpacked(tmp_path: Path, initrd: Path) -> None:
    """Linux Documentation/arch/arm64/booting.rst: "ARM\\x64" at 56; RHEL 9 packs it with gzip."""
    kernel = bytes(56) + b"ARM\x64" + b"arm kernel"
    tree, tars = applied(tmp_path, tar(*system(kernel=gzip.compress(kernel))))
    out = tmp_path / "out"
    out.mkdir()
    ownkernel.take(tree, tars, initrd, out, AARCH64)
    assert (out / "kernel").read_bytes() == kernel


def test_a_kernel_of_a_pc_is_refused_for_arm(tmp_path: Path, initrd: Path) -> None:
    tree, tars = applied(tmp_path, tar(*system()))
    with pytest.raises(RefusedError, match="cannot be used: it is not a kernel for aarch64"):
        ownkernel.take(tree, tars, initrd, tmp_path, AARCH64)


def test_a_kernel_with_dm_verity_is_recognized(tmp_path: Path, initrd: Path) -> None:
    found, out = taken(tmp_path, initrd, *system(builtin="kernel/drivers/md/dm-verity.ko\n"))
    assert found["verity"] is True
    assert "modules/verity" in unpacked(out / "initrd")


def test_drivers_in_the_kernel_itself_need_no_file(tmp_path: Path, initrd: Path) -> None:
    builtin = "kernel/virtio_blk.ko\nkernel/virtio_pci.ko\n"
    dep = modules_dep({name: needs for name, needs in DEPENDENCIES.items() if name not in builtin})
    _, out = taken(tmp_path, initrd, *system(dep=dep, builtin=builtin))
    order = unpacked(out / "initrd")["modules/load"].decode().split()
    assert "virtio_net.ko" in order
    assert "virtio_blk.ko" not in order


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no systemd": ({"systemd": "sbin/openrc-init"}, "it has no systemd"),
    "no kernel": ({"image": "boot/vmlinuz"}, "it has no kernel: "),
    "no erofs": ({"without": "erofs"}, f"kernel {RELEASE} .*has no module erofs"),
    "no virtiofs": ({"without": "virtiofs"}, "has no module virtiofs"),
    "a kernel for another machine": ({"kernel": bytes(4096)}, "is not a bzImage for x86-64"),
    "a short kernel": ({"kernel": b"MZ"}, "is not a bzImage for x86-64"),
    "modules outside": ({"dep": "../../../../etc/erofs.ko:\n"}, "has no module virtio_pci"),
    "modules by absolute paths": (
        {"dep": modules_dep(DEPENDENCIES).replace("kernel/erofs.ko.xz", "/etc/erofs.ko.xz")},
        "is not a module of its kernel",
    ),
    "a module that is missing": (
        {"dep": modules_dep({**DEPENDENCIES, "erofs": ("nothing",), "nothing": ()})},
        "lacks the module kernel/nothing.ko.xz",
    ),
    "modules that need each other": (
        {"dep": "".join(f"kernel/erofs{i}.ko: kernel/erofs{i + 1}.ko\n" for i in range(5000)) + modules_dep(
            {**DEPENDENCIES, "erofs": ("x",)}).replace("x.ko.xz", "erofs0.ko")},
        "has modules that need each other endlessly",
    ),
    "bytes that are no text": ({"dep": b"\xff\xfe\0".decode("latin-1") * 10}, "has no module virtio_pci"),
}  # fmt: skip


@pytest.mark.promise("attack.disk-image")
@pytest.mark.parametrize("name", BAD)
def test_a_source_without_a_usable_kernel_is_refused(tmp_path: Path, initrd: Path, name: str) -> None:
    changes, says = BAD[name]
    with pytest.raises(RefusedError, match=says):
        taken(tmp_path, initrd, *system(**changes))


def test_a_damaged_module_is_refused(tmp_path: Path, initrd: Path) -> None:
    damaged = (f"usr/lib/modules/{RELEASE}/kernel/erofs.ko.xz", "not xz")
    with pytest.raises(RefusedError, match=r"cannot unpack kernel module erofs\.ko\.xz"):
        taken(tmp_path, initrd, *system(), damaged)


def test_a_kernel_that_is_a_folder_is_refused(tmp_path: Path, initrd: Path) -> None:
    entries = [one for one in system() if not one[0].endswith("vmlinuz")]
    with pytest.raises(RefusedError, match="it has no kernel: "):
        taken(tmp_path, initrd, *entries, f"usr/lib/modules/{RELEASE}/vmlinuz/")


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ({"containers.bootc": "1"}, True),
        ({"containers.bootc": "0"}, False),
        ({}, False),
        (None, False),
        ([], False),
    ],
)
def test_a_container_says_that_it_boots(labels: object, expected: bool) -> None:
    assert taking.is_bootable({"config": {"Labels": labels}}) is expected
    assert taking.is_bootable({}) is False


def test_archives_of_cpio_are_read(initrd: Path) -> None:
    assert newc.files(initrd.read_bytes()) == SITE
    assert newc.files(newc.Archive().to_bytes()) == {}


@pytest.mark.parametrize("size", [0, 50, 109, 300, 700])
def test_an_archive_that_is_cut_is_refused(initrd: Path, size: int) -> None:
    with pytest.raises(BootFileError, match=r"no sound header at byte|is cut off"):
        newc.files(initrd.read_bytes()[:size])
