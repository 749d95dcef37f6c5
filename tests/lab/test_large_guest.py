# SPDX-License-Identifier: Apache-2.0
"""A guest of more vCPUs than eight bits of APIC ID can name, started by libvirt and booted in software.

Two real CPUs emulate 288: every one of them has its timer, so this takes
minutes.  QEMU's software emulation can do it since 9.0.
"""

from __future__ import annotations

import base64
import re
import subprocess
import textwrap
from pathlib import Path

import pytest
from cluster import Lab

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(2400)]

PROGRAM = Path(__file__).parent.parent / "image" / "programs" / "cpus.c"
VCPUS = 288
DEADLINE_S = 1800
# Without them each vCPU measures its clock again, which all of them at once cannot do here, and the
# kernel wakes all at the same time, to wait for each other.
WORDS = "lpj=4000000 cpuhp.parallel=off nowatchdog tsc=unstable"

BOOT = textwrap.dedent("""
    import base64, os, pathlib, sys, tempfile, time
    from dataclasses import replace
    from vhpc_slurm.catalog import FolderCatalog
    from vhpc_slurm.config import load
    from vhpc_slurm.domain.render import render
    from vhpc_slurm.domain.spec import DomainSpec
    from vhpc_slurm.model import (
        Generation, GuestCell, GuestPaths, GuestPlan, GuestTopology, ImageRef, RunningGuest, VcpuPin,
    )
    from vhpc_slurm.node.guest import console, libvirtd, refusal
    from vhpc_slurm.node.host import accounts, inventory
    from vhpc_slurm.node.store import images
    from vhpc_slurm.node.store.layout import Layout

    def finished(copying):
        try:
            while True:
                next(copying)
        except StopIteration as end:
            return end.value

    config, count, words = load(), int(sys.argv[1]), sys.argv[2]
    host = inventory.read_inventory(os.uname().nodename, config)
    real = [cpu.os_cpu for cpu in host.cpus if cpu.online]
    folder = pathlib.Path(tempfile.mkdtemp(dir=config.paths.run))
    folder.chmod(0o711)
    uid = config.guests.uid_base + config.guests.uid_count - 1
    image = FolderCatalog(pathlib.Path(config.images.catalog)).resolve(ImageRef.parse("debian-minimal"))
    staged = finished(images.stage(Layout(config), image))
    (folder / "kernel").write_bytes(staged.kernel.read_bytes())
    (folder / "initrd").write_bytes(base64.b64decode("ARCHIVE"))
    console.prepare(folder / "console.log", 0)
    (folder / "channel").mkdir()
    half = count // 2
    far = (((0, 10), (1, 20)), ((0, 20), (1, 10)))
    cells = tuple(
        GuestCell(c, tuple(range(c * half, (c + 1) * half)), 1024, 0, far[c]) for c in (0, 1)
    )
    plan = GuestPlan(
        0, "probe", tuple(VcpuPin(n, real[n % len(real)], n // half) for n in range(count)),
        GuestTopology(2, 1, half // 2, 2), cells, 2048, tuple(real), "",
        paths=GuestPaths(
            str(folder), str(folder / "kernel"), str(folder / "initrd"), str(staged.root),
            str(folder / "channel/agent.sock"), str(folder / "console.log"),
        ),
    )
    spec = DomainSpec(
        "vhpc-1-0-00000000-g0", Generation(1, 0, "00000000"), RunningGuest(plan, uid),
        replace(host, kvm=False), replace(image.manifest, cmdline=words),
        accounts.group_id(config.guests.qemu_group), 11_003_000, config.guests.emulator,
    )
    with libvirtd.connect(config.guests.libvirt_uri, 60) as hypervisor:
        refusal.check_vcpus(hypervisor, [plan], host, config.guests.emulator)
        began = time.monotonic()
        try:
            hypervisor.create(render(spec), 300)
            while hypervisor.running(spec.name) and time.monotonic() - began < int(sys.argv[3]):
                time.sleep(1)
                if "cpus: end" in (folder / "console.log").read_text(errors="replace"):
                    break
        finally:
            hypervisor.destroy(spec.name)
    print((folder / "console.log").read_text(errors="replace"))
    print("seconds", round(time.monotonic() - began))
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    folder.rmdir()
""")


@pytest.mark.promise("place.many-vcpus")
def test_a_guest_of_288_vcpus_boots_with_all_of_them(lab: Lab, tmp_path: Path) -> None:
    qemu = lab.run("n1", "qemu-system-x86_64", "--version").out
    if int(re.findall(r"version (\d+)\.", qemu)[0]) < 9:
        pytest.skip("QEMU before 9.0 emulates no APIC IDs beyond 254: use a lab of Debian 13 or newer")
    program = tmp_path / "init"
    build = ["gcc", "-std=c17", "-D_GNU_SOURCE", "-O1", "-static", "-o", str(program), str(PROGRAM)]
    subprocess.run(build, check=True, timeout=60)
    archive = subprocess.run(
        ["cpio", "--quiet", "-o", "-H", "newc"], input=b"init", cwd=tmp_path, check=True, capture_output=True
    ).stdout
    script = BOOT.replace("ARCHIVE", base64.b64encode(archive).decode())
    done = lab.run(
        "n1",
        "/opt/vhpc/bin/python",
        "-",
        str(VCPUS),
        WORDS,
        str(DEADLINE_S),
        stdin=script,
        timeout=DEADLINE_S + 300,
    )
    said = [line.removeprefix("cpus: ") for line in done.out.splitlines() if line.startswith("cpus: ")]
    assert f"/sys/devices/system/cpu/online 0-{VCPUS - 1}" in map(str.strip, said), done.out[-3000:]
    assert "/sys/devices/system/node/online 0-1" in map(str.strip, said)
    assert "Enabled IRQ remapping in x2apic mode" in done.out
    assert "DMAR: IOMMU disabled" in done.out  # it means the translation of DMA only
