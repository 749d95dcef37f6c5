# SPDX-License-Identifier: Apache-2.0
"""A job on a node of arm64: KVM at EL2, virtual functions behind an SMMUv3, interrupts by GICv3 and its ITS.

The machine's disk and image are built in user mode emulation, which takes 15 minutes once.  It needs packages
arch-test, gcc-aarch64-linux-gnu, libc6-dev-arm64-cross and qemu-user-static, with its entry in binfmt_misc.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator

import pytest
from machine import GPU, HWLAB, PF, SCRIPT, VF, Machine

pytestmark = [pytest.mark.hw, pytest.mark.slow, pytest.mark.timeout(7200)]

COMPILER = "aarch64-linux-gnu-gcc"
STANDIN, VIRTUAL_82576 = "0x1b36:0x0005", "0x8086:0x10ca"
SAYS = """echo "machine $(uname -m) $(srun uname -m)"
grep -o 'ITS-PCI-MSI.*' /proc/interrupts
echo up
"""


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    """The machine of arm64, instead of the one of other tests, which boots again for the next test."""
    if shutil.which(COMPILER) is None:
        pytest.skip("needs a compiler for arm64: apt install gcc-aarch64-linux-gnu libc6-dev-arm64-cross")
    found = Machine(options=("--arch", "arm64"), slowness=3)
    if found.alive():
        subprocess.run([HWLAB, "down"], check=True, timeout=60)
    found.boot()
    yield found
    subprocess.run([HWLAB, "down"], check=True, timeout=60)


def test_a_job_on_arm64_has_its_devices_and_gives_them_back(quiet: Machine) -> None:
    before = quiet.probe("node")
    job = quiet.sbatch(SCRIPT.replace("echo up\n", SAYS), "--gres=gpu:1", "--vhpc-vfs=1")
    with quiet.stage("arm64: sbatch to the script in the guest"):
        job.runs()
    during = quiet.probe("guest", job.domain())
    said = job.output()
    with quiet.stage("arm64: end to idle node"):
        job.let_go()
        state = job.wait()
        quiet.until(lambda: quiet.node()[0] == "idle", "an idle node")
    assert state == "COMPLETED"

    # in the guest: two cells with a CPU each, both devices at the second, and an ITS
    assert "machine aarch64 aarch64" in said
    assert "ITS-PCI-MSI" in said
    seen = re.findall(r"^pci (\S+) cell (-?\d+)$", said, re.MULTILINE)
    assert [cell for kind, cell in seen if kind == STANDIN] == ["1"]
    assert [cell for kind, cell in seen if kind == VIRTUAL_82576] == ["1"]
    assert re.findall(r"^cell (\d+) cpus (\S+)$", said, re.MULTILINE) == [("0", "0"), ("1", "1")]

    # on the host: KVM, each vCPU on the one CPU of its cell; the job's two devices alone are vfio-pci's
    assert during["kvm"]
    assert [during["threads"][f"CPU {number}/KVM"] for number in (0, 1)] == [["0"], ["1"]]
    changed = {name for name, now in during["functions"].items() if now != before["functions"][name]}
    assert changed == {GPU, VF}
    assert [during["functions"][name][:2] for name in (GPU, VF)] == [["vfio-pci", "vfio-pci"]] * 2
    (vlan,) = during["vfs"][PF][0][1]
    assert 2000 <= vlan <= 2999
