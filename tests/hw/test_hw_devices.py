# SPDX-License-Identifier: Apache-2.0
"""A job with a GPU and a virtual function, on real interfaces of kernel, libvirt and Slurm."""

from __future__ import annotations

import json
import re

import pytest
from machine import GPU, PF, VF, Machine

pytestmark = [pytest.mark.hw, pytest.mark.timeout(1800)]

PAGES = 128  # host.hugepages of lab/hardware/vhpc.toml.in, for each cell
STANDIN, VIRTUAL_82576 = "0x1b36:0x0005", "0x8086:0x10ca"


@pytest.mark.promise("hw.job")
def test_a_job_has_its_gpu_and_its_function_and_gives_them_back(quiet: Machine) -> None:
    before = quiet.probe("node")
    job = quiet.submit()
    with quiet.stage("job: sbatch to its script in the guest"):
        job.runs()
    during = quiet.probe("guest", job.domain())
    said = job.output()
    with quiet.stage("job: end to idle node"):
        job.let_go()
        state = job.wait()
        quiet.until(lambda: quiet.node()[0] == "idle", "an idle node")
    assert state == "COMPLETED"
    assert before["free"] == {"0": PAGES, "1": PAGES}

    # in the guest: two cells with a CPU each, both devices at the second, where they are on the host
    seen = re.findall(r"^pci (\S+) cell (-?\d+)$", said, re.MULTILINE)
    assert [cell for kind, cell in seen if kind == STANDIN] == ["1"]
    assert [cell for kind, cell in seen if kind == VIRTUAL_82576] == ["1"]
    assert re.findall(r"^cell (\d+) cpus (\S+)$", said, re.MULTILINE) == [("0", "0"), ("1", "1")]
    assert "env SLURM_JOB_GPUS=0" in said

    # on the host: each vCPU on the one CPU of its cell, each cell's memory in huge pages of that cell alone
    assert during["kvm"]
    assert during["threads"]["CPU 0/KVM"] == ["0"]
    assert during["threads"]["CPU 1/KVM"] == ["1"]
    assert during["free"] == {"0": 0, "1": 0}
    bound = [
        (cell, pages, size)
        for line in during["maps"]
        for cell, pages, size in re.findall(r" bind:(\d)\S* .* N\1=(\d+) kernelpagesize_kB=(\d+)", line)
    ]
    assert sorted(bound) == [("0", str(PAGES), "2048"), ("1", str(PAGES), "2048")]

    # the job's two devices alone are vfio-pci's, and its function alone is on a network: the job's own VLAN
    changed = {name for name, now in during["functions"].items() if now != before["functions"][name]}
    assert changed == {GPU, VF}
    assert [during["functions"][name][:2] for name in (GPU, VF)] == [["vfio-pci", "vfio-pci"]] * 2
    ((address, (vlan,), *_), second), others = during["vfs"].pop(PF), during["vfs"]
    assert 2000 <= vlan <= 2999
    assert address.replace(":", "").startswith(f"02{vlan:03x}")
    parked = ["00:00:00:00:00:00", [], "auto", True, False]
    assert [second, *(vf for vfs in others.values() for vf in vfs)] == [parked] * 3

    # QEMU is in its generation's slice, not in the job's cgroup; it has no rights of its own
    assert during["cgroup"].startswith("0::/vhpc.slice/vhpc-")
    assert during["status"]["CapEff"] == "0000000000000000"
    assert int(during["status"]["Uid"]) >= 700000


def test_doctor_finds_the_node_set_up_as_the_manual_says(quiet: Machine) -> None:
    with quiet.stage("vhpc doctor"):
        findings = json.loads(quiet.run("vhpc", "doctor", "--json", check=False, timeout=120).out)
    assert len(findings) > 30
    assert [finding for finding in findings if finding["level"] == "error"] == []
