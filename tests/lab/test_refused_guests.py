# SPDX-License-Identifier: Apache-2.0
"""A guest that libvirt or QEMU refuses: its job fails, an alarm reports it, and every node continues.

The image whose kernel QEMU cannot load stands for all that QEMU refuses; what
libvirt itself refuses is shown to it by the node library on a node, for no job
of a lab asks for that much.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest
from cluster import IMAGE, NODES, Lab
from injection import one_line, settled
from variants import PRELUDE

pytestmark = pytest.mark.lab

NAME = "test-no-kernel"
# A manifest of its own with only the first part of a kernel.
PUBLISH = f"""
base = load("{IMAGE}")
part = (top / "blobs/sha256" / base["kernel"]["sha256"]).read_bytes()[:100000]
found = hashlib.sha256(part).hexdigest()
(top / "blobs/sha256" / found).write_bytes(part)
print(found, publish("{NAME}", base | {{"kernel": base["kernel"] | {{"sha256": found, "size": len(part)}}}}))
"""

# On a node: a guest as Prolog makes one, changed as the case says; prints the class and the line.
TRY = textwrap.dedent("""
    import os, pathlib, sys, tempfile
    from dataclasses import replace
    from vhpc_slurm.config import load
    from vhpc_slurm.domain.render import render
    from vhpc_slurm.domain.spec import DomainSpec
    from vhpc_slurm.errors import VhpcError
    from vhpc_slurm.model import (
        Blob, Generation, GuestCell, GuestPaths, GuestPlan, GuestTopology, ImageManifest, RunningGuest,
        VcpuPin,
    )
    from vhpc_slurm.node.guest import console, libvirtd, refusal
    from vhpc_slurm.node.host import accounts, inventory

    config = load()
    host = inventory.read_inventory(os.uname().nodename, config)
    folder = pathlib.Path(tempfile.mkdtemp(dir=config.paths.run))
    folder.chmod(0o711)
    uid = config.guests.uid_base + config.guests.uid_count - 1
    for name in ("kernel", "initrd", "root"):
        (folder / name).write_bytes(bytes(4096))
    console.prepare(folder / "console.log", 0)
    (folder / "channel").mkdir()

    paths = GuestPaths(
        str(folder), root=str(folder / "root"), agent_socket=str(folder / "channel/agent.sock"),
        console_log=str(folder / "console.log"),
    )

    def guest(cores, **files):
        plan = GuestPlan(
            0, "probe", tuple(VcpuPin(n, 0, 0) for n in (0, 1)), GuestTopology(1, 1, cores, 1),
            (GuestCell(0, (0, 1), 128, 0),), 128, (0,), "", paths=replace(paths, **files),
        )
        return RunningGuest(plan, uid)

    blob = Blob("x", "0" * 64, 1)
    manifest = ImageManifest(
        1, "probe", "1", host.arch, blob, blob, blob, "erofs", "agent", "", 64, "", (), "1"
    )
    spec = DomainSpec(
        "vhpc-1-0-00000000-g0", Generation(1, 0, "00000000"), guest(2), host, manifest,
        accounts.group_id(config.guests.qemu_group), 9_000_000, config.guests.emulator,
    )
    with libvirtd.connect(config.guests.libvirt_uri, 60) as hypervisor:
        for case in sys.argv[1:]:
            changed = {
                "topology": lambda: replace(spec, running=guest(3)),
                "kernel": lambda: replace(
                    spec, running=guest(2, kernel=paths.root, initrd=str(folder / "initrd"))
                ),
                "emulator": lambda: replace(spec, emulator="/bin/false"),
                "absent": lambda: replace(spec, emulator="/nowhere/qemu"),
                "unreadable": lambda: replace(
                    spec, running=guest(2, kernel="/nowhere/kernel", initrd="/nowhere/initrd")
                ),
                "kvm": lambda: replace(spec, host=replace(host, kvm=True)),
            }[case]()
            try:
                try:
                    hypervisor.create(render(changed), 60)
                    print(case, "started")
                except libvirtd.DomainRefusedError as err:
                    raise refusal.judge(hypervisor, changed, err) from err
            except VhpcError as err:
                print(case, type(err).__name__, err.line())
            assert hypervisor.names() == [], hypervisor.names()
        print("most", refusal.most_vcpus(hypervisor, host, config.guests.emulator))
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    folder.rmdir()
""")


@pytest.fixture(scope="module")
def broken(lab: Lab) -> Iterator[str]:
    catalog = lab.vhpc("ctl", "config")["images"]["catalog"]
    blob, manifest = lab.run("ctl", "python3", "-", stdin=PRELUDE + PUBLISH).out.split()
    yield NAME
    script = f"cd {catalog} && rm -r names/{NAME} manifests/sha256/{manifest}.json blobs/sha256/{blob}"
    lab.run("ctl", "sh", "-c", script)


def alarms(lab: Lab, host: str) -> list[dict[str, Any]]:
    return [found for found in lab.vhpc(host, "doctor", check=False) if found["check"] == "alarms"]


@pytest.mark.promise("boot.refused", "attack.every-qemu")
def test_a_domain_refused_by_qemu_fails_only_its_job(lab: Lab, broken: str) -> None:
    jobs = []
    for node in NODES:
        job = lab.finish("echo ran", "-w", node, image=broken)
        assert job.accounted() == ["FAILED", "1:0"]
        one_line(job, rf"the guest of this job does not start on {node}: libvirt or QEMU refuses it.*kernel")
        jobs.append(job)
    settled(lab)  # no node was drained
    for node, job in zip(NODES, jobs, strict=True):
        said = lab.run(node, "grep", f"job {job.id}: ERROR", "/var/log/vhpc/hooks.log").out
        assert "libvirt or QEMU refuses it" in said
    for host in ("ctl", "n1"):
        found = [one for one in alarms(lab, host) if "kernel" in one["what"]]
        assert len(found) == 1, found
        assert found[0]["level"] == "warn"
        assert re.search(rf"on n1, n2, last of job {jobs[-1].id} ", found[0]["what"])
    # and the nodes do start other guests
    assert lab.finish("hostname", "-N2", "--ntasks-per-node=1").accounted() == ["COMPLETED", "0:0"]


@pytest.mark.promise("boot.refused")
def test_an_alarm_outlives_vhpcd(lab: Lab, broken: str) -> None:
    job = lab.finish("echo ran", "-w", "n1", image=broken)
    settled(lab)
    lab.service("ctl", "stop", "vhpcd")
    lab.service("ctl", "start", "vhpcd")
    assert any(f"last of job {job.id} " in found["what"] for found in alarms(lab, "ctl"))


@pytest.mark.promise("boot.refused")
def test_libvirts_text_tells_a_refused_guest_from_a_bad_node(lab: Lab) -> None:
    cases = ("topology", "kernel", "emulator", "absent", "unreadable", "kvm")
    done = lab.run("n1", "/opt/vhpc/bin/python", "-", *cases, stdin=TRY)
    said = {line.split(" ", 1)[0]: line.split(" ", 1)[1] for line in done.out.splitlines()}
    kinds = {case: said[case].split(" ", 1)[0] for case in cases}
    # the lab's nodes have no /dev/kvm: there no guest of that type starts, whatever its job asks for
    assert kinds == {
        "topology": "RefusedGuestError",
        "kernel": "RefusedGuestError",
        "emulator": "NodeError",
        "absent": "NodeError",
        "unreadable": "NodeError",
        "kvm": "NodeError",
    }, said
    assert "CPU topology doesn't match" in said["topology"]
    assert "no guest starts on n1" in said["emulator"]
    # before 9.0 QEMU's software emulation has APIC IDs of eight bits only
    qemu = lab.run("n1", "qemu-system-x86_64", "--version").out
    major = int(re.findall(r"version (\d+)\.", qemu)[0])
    assert int(said["most"]) == (4096 if major >= 9 else 255)
