# SPDX-License-Identifier: Apache-2.0
"""The interface of a job's network, in a machine with KVM: the kernel passes its packets, not QEMU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from machine import SCRIPT, Machine

pytestmark = [pytest.mark.hw, pytest.mark.timeout(1800)]

CONFIG = "/etc/vhpc/vhpc.toml"
ALLOW = f"""set -e
cp {CONFIG} /run/vhpc-test.toml
printf '[network]\\nallowed = ["none", "job"]\\n' >> {CONFIG}
systemctl restart vhpcd
"""
RESTORE = f"cp /run/vhpc-test.toml {CONFIG} && rm /run/vhpc-test.toml && systemctl restart vhpcd"
QUEUES = "echo queues $(ls -d /sys/class/net/vhpc0/queues/rx-* | wc -l)\n"


@pytest.fixture
def networked(quiet: Machine) -> Iterator[Machine]:
    """The machine, whose site allows job networks."""
    quiet.run("sh", stdin=ALLOW)
    yield quiet
    quiet.shell(RESTORE)


def test_a_guest_has_vhost_net_with_a_queue_for_each_vcpu(networked: Machine) -> None:
    job = networked.sbatch(SCRIPT.replace("echo up\n", f"{QUEUES}echo up\n"), "--vhpc-network=job")
    job.runs()
    during = networked.probe("guest", job.domain())
    said = job.output()
    job.let_go()
    assert job.wait() == "COMPLETED", job.output()
    assert "queues 2\n" in said
    assert during["vhost"] == 2
    # vhost's threads take time of the job's CPUs, and of no others
    assert during["threads"][f"vhost-{during['pid']}"] == ["0-1"] * 2
    findings = networked.shell("vhpc doctor --json", check=False).out
    assert "packets of guests pass through the kernel: /dev/vhost-net" in findings
