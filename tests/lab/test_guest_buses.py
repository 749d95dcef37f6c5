# SPDX-License-Identifier: Apache-2.0
"""Where a guest's kernel finds what was planned for it: firmware gives the numbers, so it is asked."""

from __future__ import annotations

import re

import pytest
from cluster import Lab

pytestmark = pytest.mark.lab

# The buses of tests/data/domain/devices.xml, with virtio devices in place of what no machine here has.
SCRIPT = r"""
for f in /shared/vhpc/catalog/blobs/sha256/*; do
    [ "$(head -c4 "$f" | tail -c3)" = ELF ] && kernel=$f
done
exec timeout 90 qemu-system-x86_64 -machine q35 -accel tcg -m 512 -nodefaults -display none -serial stdio \
    -no-reboot -object memory-backend-ram,id=m0,size=512M -numa node,nodeid=0,memdev=m0 \
    -device pxb-pcie,id=pci.1,bus_nr=249,bus=pcie.0,numa_node=0 \
    -device pcie-root-port,id=pci.2,bus=pci.1,chassis=2,addr=0 -device x3130-upstream,id=pci.3,bus=pci.2 \
    -device xio3130-downstream,id=pci.4,bus=pci.3,chassis=4,addr=0 \
    -device xio3130-downstream,id=pci.5,bus=pci.3,chassis=5,addr=1 \
    -device pxb-pcie,id=pci.6,bus_nr=254,bus=pcie.0,numa_node=0 \
    -device pcie-root-port,id=pci.7,bus=pci.6,chassis=7,addr=0 \
    -device virtio-rng-pci,bus=pci.4 -device virtio-balloon-pci,bus=pci.5 \
    -device virtio-serial-pci,bus=pci.7 \
    -kernel "$kernel" -append 'console=ttyS0 panic=-1'
"""


@pytest.mark.promise("devices.nccl")
def test_buses_behind_ports_follow_the_plans_order(lab: Lab) -> None:
    """What ``nccl.guest_address`` goes by; ``test_nccl_topology.py`` has the same three addresses."""
    said = lab.run("n1", "sh", "-s", stdin=SCRIPT, check=False, timeout=120).out
    found = {device: address for address, device in re.findall(r"pci (\S+): \[1af4:(\w+)\] type 00", said)}
    assert found == {"1044": "0000:fc:00.0", "1045": "0000:fd:00.0", "1043": "0000:ff:00.0"}, said[-2000:]
