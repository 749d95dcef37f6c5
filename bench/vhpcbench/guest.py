# SPDX-License-Identifier: Apache-2.0
"""Boot of a guest's own system, against the same system as its distribution boots it.

A job with an image of Debian with systemd: from the start of its QEMU until its agent
answers. The reference is the same release with the packages of the image's recipe, the
distribution's kernel package and initramfs-tools' initrd on an ext4 disk, in a plain guest
with the same machine type, CPU model, memory and CPUs, until its console has a login
prompt. The first run builds the reference, which takes minutes and needs network.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from vhpcbench.common import CHECKOUT, BenchError, Lab, Report, main
from vhpcbench.plain import GuestFacts, facts, on_node, qemu
from vhpcbench.targets import at_most

sys.path.insert(0, str(CHECKOUT))
from vmimages import mirrors

TARGETS = (at_most(0.7, "time of the distribution's own boot"),)
IMAGE = "debian-cloud"
CACHE = Path("/var/cache/vhpc-bench")
KERNEL = "linux-image-cloud-amd64"
SIZE_MIB = 1600
CMDLINE = "root=/dev/vda ro console=ttyS0 no_timer_check"
"""As Debian's cloud images have it; without the timer check, which fails on busy emulated hosts."""
PROMPT = "login: "


def run() -> int:
    """Entry point."""
    return main("guest", __doc__ or "", 5, bench, lambda parser: parser.set_defaults(image=IMAGE))


def bench(args: argparse.Namespace) -> Report:
    """Run rounds of a job and of the reference."""
    lab, report = Lab(), Report("guest")
    reference = _reference(lab)
    ours, theirs = [], []
    try:
        guest = facts(lab, args.image)
        for _ in range(args.rounds):
            job = lab.hold(f"--vhpc-image={args.image}")
            stages = {stage["name"]: stage for stage in lab.timeline(job)}
            lab.cancel(job)
            ours.append(stages["agent g0"]["ended"] - stages["agent g0"]["began"])
            theirs.append(_measure(lab, reference, guest))
    finally:
        for path in reference.values():
            path.unlink()
    report.add("guest: QEMU's start until the agent answers", "s", ours)
    report.add("distribution's own boot, to its login prompt", "s", theirs)
    ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    report.ratios["to the distribution's own boot"] = ratio
    report.judge(TARGETS[0], ratio)
    return report


def _reference(lab: Lab) -> dict[str, Path]:
    """Kernel, initrd and disk of the reference in the lab's scratch folder."""
    recipe = tomllib.loads((CHECKOUT / f"vmimages/recipes/{IMAGE}.toml").read_text(encoding="utf-8"))
    suite, packages = recipe["debian"]["suite"], [*recipe["debian"]["packages"], KERNEL, "initramfs-tools"]
    key = hashlib.sha256(" ".join(packages).encode()).hexdigest()[:12]
    files = CACHE / f"{suite}-{key}"
    if not files.exists():
        CACHE.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            _build(Path(folder), suite, packages)
            (Path(folder) / "files").rename(files)
    made = {}
    for name in ("kernel", "initrd", "disk"):
        made[name] = lab.paths["scratch"] / f"bench-{name}"
        subprocess.run(["cp", "--sparse=always", files / name, made[name]], check=True)
    return made


def _build(folder: Path, suite: str, packages: list[str]) -> None:
    """Install the packages into a tree, and make a disk of it."""
    tree, files = folder / "tree", folder / "files"
    files.mkdir()
    print(f"installing Debian {suite} with {len(packages)} packages for the reference ...", file=sys.stderr)
    archive, security = (os.environ.get(name, "") for name in mirrors.ENVIRONMENT)
    sources = mirrors.sources(suite, mirrors.choose(suite, archive, security))
    command = ["mmdebstrap", "--mode=root", "--format=directory", "--variant=minbase"]
    command += ["--include=" + ",".join(packages), suite, str(tree), *sources]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchError(f"mmdebstrap failed: {done.stderr[-1000:]}")
    for name, pattern in (("kernel", "vmlinuz-*"), ("initrd", "initrd.img-*")):
        (found,) = (tree / "boot").glob(pattern)
        shutil.copy(found, files / name)
    (tree / "etc/fstab").write_text("/dev/vda / ext4 defaults 0 1\n", encoding="utf-8")
    disk = ["mke2fs", "-q", "-t", "ext4", "-d", str(tree), str(files / "disk"), f"{SIZE_MIB}M"]
    subprocess.run(disk, check=True, stdout=sys.stderr)  # it names the file that it creates


def _measure(lab: Lab, files: dict[str, Path], guest: GuestFacts) -> float:
    """Seconds from QEMU's start to the login prompt."""
    argv = [*qemu(guest), "-snapshot"]
    argv += ["-kernel", f"/scratch/{files['kernel'].name}", "-initrd", f"/scratch/{files['initrd'].name}"]
    argv += ["-append", CMDLINE, "-object", "rng-random,id=rng,filename=/dev/urandom"]
    argv += ["-device", "virtio-rng-pci,rng=rng"]
    argv += ["-drive", f"file=/scratch/{files['disk'].name},if=none,id=root,format=raw"]
    argv += ["-device", "virtio-blk-pci,drive=root"]
    return float(on_node(lab, argv, cpus=guest.cpus, marker=PROMPT)["seconds"])
