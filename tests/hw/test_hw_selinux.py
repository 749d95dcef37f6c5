# SPDX-License-Identifier: Apache-2.0
"""Jobs on a node where SELinux enforces Debian's policy and vhpc's module of the RPMs."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator

import pytest
from machine import HWLAB, SCRIPT, Machine

pytestmark = [pytest.mark.hw, pytest.mark.timeout(3600)]

# libvirt's label of a QEMU: a domain of guests, with two categories that no other guest has
SVIRT = re.compile(r"system_u:system_r:svirt(?:_tcg)?_t:s0:c\d+,c\d+")
# Services whose denials concern jobs; others are those of Debian's own services
CONCERN = re.compile(r"(?:svirt|virtd|virtlogd|vhpc|initrc|virt_content|virt_image)\w*_t:")
CONFIGURE = """set -e
printf '[network]\\nallowed = ["none", "job", "nat"]\\n[disks]\\nmax_mib = 1024\\n' >> /etc/vhpc/vhpc.toml
systemctl restart vhpcd
"""
USES = """set -e
echo selinux > ~/written-$SLURM_JOB_ID
[ "$(cat ~/written-$SLURM_JOB_ID)" = selinux ]
srun true
"""


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    """The machine with SELinux, instead of the one of other tests, which boots again for the next test."""
    found = Machine(options=("--selinux",))
    if found.alive():
        subprocess.run([HWLAB, "down"], check=True, timeout=60)
    found.boot()
    found.run("sh", stdin=CONFIGURE)
    yield found
    subprocess.run([HWLAB, "down"], check=True, timeout=60)


def denials(machine: Machine) -> list[str]:
    """Denials since the machine's boot, of processes and files that have to do with guests."""
    lines = machine.shell("cat /var/log/audit/audit.log; dmesg").out.splitlines()
    return [line for line in lines if "denied" in line and CONCERN.search(line)]


@pytest.mark.promise("selinux.jobs")
@pytest.mark.parametrize(
    "options",
    [("--gres=gpu:1", "--vhpc-vfs=1"), ("--vhpc-network=job", "--vhpc-disk=100M"), ("--vhpc-network=nat",)],
    ids=["devices", "job-network-and-disk", "nat"],
)
def test_a_job_runs_while_selinux_enforces_without_a_denial(quiet: Machine, options: tuple[str, ...]) -> None:
    assert quiet.run("getenforce").out == "Enforcing\n"
    before = denials(quiet)
    job = quiet.sbatch(SCRIPT.replace("echo up\n", f"{USES}echo up\n"), *options)
    job.runs()
    labels = quiet.run("ps", "-eo", "label,args").out.splitlines()
    (guest,) = [line for line in labels if f"guest=vhpc-{job.id}-" in line]
    assert SVIRT.match(guest)
    helpers = [line for line in labels if re.search(r"/virtiofsd |/vhpc-locks |passt ", line)]
    assert helpers
    assert all("vhpc_helper_t" in line.split()[0] for line in helpers)
    job.let_go()
    assert job.wait() == "COMPLETED", job.output()
    quiet.until(lambda: quiet.node()[0] == "idle", "an idle node")
    assert denials(quiet) == before
