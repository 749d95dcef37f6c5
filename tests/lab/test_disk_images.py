# SPDX-License-Identifier: Apache-2.0
"""A user's own disk image as a guest: with its own kernel, its systemd, and the agent as a unit."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Lab, publish

from pace import limit

pytestmark = pytest.mark.lab

ROOT = Path(__file__).resolve().parents[2]
BASE = "debian-cloud"
FSTAB = "UUID=0d2ecb0d-8a40-4a86-b0d6-9f9a0d1a6d4c / ext4 rw 0 1\nLABEL=UEFI /boot/efi vfat umask=0077 0 1\n"
"""As in cloud images; a systemd that read it would wait 90 s for both."""
TABLE = "label: gpt\nstart=2048, size=20480, type=uefi\nstart=24576, type=linux\n"
SIZE_MIB, FIRST_MIB = 1400, 12
# the longest that the lab allows
TIMEOUT = f"--vhpc-timeout={int(limit(180))}"


@pytest.fixture(scope="module")
def shared(lab: Lab) -> Path:
    """The lab's /shared, on this host."""
    status = subprocess.run([ROOT / "lab/vlab", "status", "--json"], check=True, capture_output=True)
    return Path(json.loads(status.stdout)["paths"]["shared"])


@pytest.fixture(scope="module")
def system(lab: Lab, shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The files of a Debian with systemd, and its kernel as `vmlinuz`."""
    publish(BASE)
    catalog, top = shared / "vhpc/catalog", tmp_path_factory.mktemp("system")
    digest = (catalog / f"names/{BASE}/latest").read_text().strip().removeprefix("sha256:")
    manifest = json.loads((catalog / f"manifests/sha256/{digest}.json").read_text())
    blobs = {name: catalog / "blobs/sha256" / manifest[name]["sha256"] for name in ("kernel", "root")}
    tree = top / "tree"
    subprocess.run(["fsck.erofs", f"--extract={tree}", blobs["root"]], check=True, capture_output=True)
    shutil.copyfile(blobs["kernel"], top / "vmlinuz")
    (tree / "etc/fstab").write_text(FSTAB)
    (tree / "usr/bin/sudo").chmod(0o4755)  # fsck.erofs loses the bit
    yield tree
    shutil.rmtree(top)


@pytest.fixture(scope="module")
def disk(lab: Lab, shared: Path, system: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A qcow2 as clouds have them: two partitions, ext4 with a Debian, its kernel in /boot."""
    top, tree = tmp_path_factory.mktemp("disk"), system
    ext4, raw = top / "root.ext4", top / "disk.raw"
    (release,) = (tree / "usr/lib/modules").iterdir()
    (tree / "boot").mkdir(exist_ok=True)
    kernel = tree / f"boot/vmlinuz-{release.name}"
    shutil.copyfile(tree.parent / "vmlinuz", kernel)
    with ext4.open("wb") as file:
        file.truncate((SIZE_MIB - FIRST_MIB - 1) << 20)
    subprocess.run(["mke2fs", "-q", "-t", "ext4", "-d", tree, ext4], check=True)
    kernel.unlink()
    with raw.open("wb") as file:
        file.truncate(SIZE_MIB << 20)
    subprocess.run(["sfdisk", "--quiet", raw], input=TABLE, text=True, check=True)
    command = ["dd", f"if={ext4}", f"of={raw}", "bs=1M", f"seek={FIRST_MIB}", "conv=notrunc,sparse"]
    subprocess.run(command, check=True, capture_output=True)
    target = shared / "cloud.qcow2"
    subprocess.run(["qemu-img", "convert", "-f", "raw", "-O", "qcow2", raw, target], check=True)
    target.chmod(0o644)
    shutil.rmtree(top)
    yield "/shared/cloud.qcow2"
    target.unlink()
    lab.run("login", "rm", "-rf", "/scratch/alice", user="alice")


@pytest.fixture(scope="module")
def image(lab: Lab, disk: str) -> str:
    """The image of that disk in alice's catalogue, NAME:TAG@DIGEST."""
    done = lab.run("login", "vhpc", "image", "resolve", disk, user="alice", timeout=600)
    for line in ("checking the qcow2 file", "converting the disk", "reading the disk in a guest"):
        assert f"vhpc: {line}" in done.err.splitlines()
    assert done.err.splitlines()[-1].endswith(" now")
    return done.out.strip()


SCRIPT = """
uname -r; cat /proc/1/comm; id -un; sudo id -un; stat -c %a:%U:%G /usr/bin/sudo /etc/shadow
cut -d/ -f1-3 /proc/self/cgroup
systemctl is-system-running --wait
srun -l sh -c 'hostname; cat /sys/class/net/vhpc0/operstate; getent hosts n1 n2 | wc -l'
"""


@pytest.mark.promise("import.disk")
@pytest.mark.timeout(500)
def test_a_cloud_image_runs_jobs_with_its_own_system(lab: Lab, image: str) -> None:
    job = lab.submit(SCRIPT, "-N2", "--mem=1200", "--vhpc-network=job", TIMEOUT, image=image)
    job.wait(timeout=400)
    assert job.accounted("State,AdminComment") == ["COMPLETED", f"vhpc: image {image}"], job.told()
    release, init, user, root, sudo, shadow, cgroup, state, *tasks = job.output().splitlines()
    assert "cloud" in release
    assert (init, user, root) == ("systemd", "alice", "root")
    assert (sudo, shadow) == ("4755:root:root", "640:root:shadow")
    assert cgroup == "0::/system.slice/vhpc-agent.service"
    assert state == "running"
    assert sorted(tasks) == sorted(f"{n}: {said}" for n in (0, 1) for said in (f"n{n + 1}", "up", "2"))


def test_the_same_disk_is_imported_once(lab: Lab, disk: str, image: str) -> None:
    again = lab.run("login", "vhpc", "image", "resolve", disk, user="alice", timeout=600)
    assert again.err.splitlines()[-1].endswith(" already")
    assert again.out.strip() == image


@pytest.mark.promise("image.agent")
def test_a_guest_whose_agent_ends_is_off(lab: Lab, image: str) -> None:
    script = "sudo systemctl kill -s KILL vhpc-agent; sleep 600"
    job = lab.finish(script, "-w", "n1", "--mem=1200", TIMEOUT, image=image)
    assert job.accounted("State")[0] in {"FAILED", "NODE_FAIL"}
    lab.quiet()
    lab.assert_clean()


@pytest.mark.promise("import.disk")
def test_disks_that_have_no_system_are_refused(lab: Lab, shared: Path) -> None:
    raw, qcow2 = shared / "empty.raw", shared / "empty.qcow2"
    with raw.open("wb") as file:
        file.truncate(64 << 20)
    subprocess.run(["mke2fs", "-q", "-t", "ext4", raw], check=True)
    subprocess.run(["qemu-img", "convert", "-f", "raw", "-O", "qcow2", raw, qcow2], check=True)
    for path in (raw, qcow2):
        path.chmod(0o644)
    cases = (
        ("raw:/shared/empty.qcow2", "it is not a raw file: its content is qcow2"),
        ("qcow2:/shared/empty.raw", "it is not a qcow2 file"),
        (
            "qcow2:/shared/empty.qcow2",
            "no file system with a Linux system that can be read; it has: vdb (ext4)",
        ),
    )
    for source, says in cases:
        done = lab.run(
            "login", "vhpc", "image", "import", source, "own/bad", user="alice", check=False, timeout=300
        )
        assert (done.code, says in done.err.splitlines()[-1]) == (1, True), done.err
    found = lab.run("login", "vhpc", "image", "ls", "--own", user="alice", check=False)
    assert "bad" not in found.out
    for path in (raw, qcow2):
        path.unlink()


def bootable_container(system: Path, target: Path, folder: Path) -> None:
    """An archive as bootc's builds give them, by the words of the OCI image specification: one layer, with
    the kernel where bootc has it."""
    blobs = folder / "blobs/sha256"
    blobs.mkdir(parents=True)

    def placed(path: Path, kind: str) -> dict[str, object]:
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        size = path.stat().st_size
        path.rename(blobs / sha256)
        return {"mediaType": f"application/vnd.oci.image.{kind}", "digest": f"sha256:{sha256}", "size": size}

    def document(fields: dict[str, object], kind: str) -> dict[str, object]:
        (folder / "document").write_text(json.dumps(fields))
        return placed(folder / "document", kind)

    (release,) = (system / "usr/lib/modules").iterdir()
    shutil.copyfile(system.parent / "vmlinuz", release / "vmlinuz")
    subprocess.run(["tar", "-C", system, "--numeric-owner", "-cf", folder / "layer", "."], check=True)
    (release / "vmlinuz").unlink()
    layer = placed(folder / "layer", "layer.v1.tar")
    config = document(
        {
            "architecture": "amd64",
            "os": "linux",
            "created": "2026-11-01T12:00:00Z",
            "config": {"Labels": {"containers.bootc": "1", "ostree.bootable": "1"}, "Cmd": ["/sbin/init"]},
            "rootfs": {"type": "layers", "diff_ids": [layer["digest"]]},
        },
        "config.v1+json",
    )
    manifest = document({"schemaVersion": 2, "config": config, "layers": [layer]}, "manifest.v1+json")
    (folder / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [manifest]}))
    (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    subprocess.run(["tar", "-C", folder, "-cf", target, "."], check=True)
    target.chmod(0o644)


@pytest.mark.promise("import.bootc")
@pytest.mark.slow
def test_a_bootable_container_boots_its_own_kernel(
    lab: Lab, shared: Path, system: Path, tmp_path: Path
) -> None:
    target = shared / "bootc.tar"
    bootable_container(system, target, tmp_path)
    try:
        done = lab.run(
            "login", "vhpc", "image", "resolve", "oci-archive:/shared/bootc.tar", user="alice", timeout=600
        )
    finally:
        target.unlink()
    image = done.out.strip()
    shown = lab.run("login", "vhpc", "image", "show", image, "--json", user="alice").out
    (release,) = (path.name for path in (system / "usr/lib/modules").iterdir())
    assert json.loads(shown)["init"] == "/usr/lib/systemd/systemd"
    assert json.loads(shown)["labels"]["containers.bootc"] == "1"
    script = "uname -r; cat /proc/1/comm; id -un; sudo id -un; systemctl is-system-running --wait"
    job = lab.finish(script, "-w", "n1", "--mem=1200", TIMEOUT, image=image)
    assert job.accounted("State")[0] == "COMPLETED", job.told()
    assert job.output().splitlines() == [release, "systemd", "alice", "root", "running"]
    lab.quiet()
    lab.assert_clean()
