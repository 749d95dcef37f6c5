# SPDX-License-Identifier: Apache-2.0
"""A node with QEMU and libvirt as on RHEL: /usr/libexec/qemu-kvm, and a daemon that listens as virtqemud.

QEMU is Debian's behind a program that refuses what RHEL's lacks (unit/support/rhel_qemu.py).  Debian has no
virtqemud: its libvirtd gets virtqemud's socket from a parent, as systemd would give it, and no other.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Lab
from injection import settled, until

pytestmark = [pytest.mark.lab, pytest.mark.slow]

NODE = "n1"
ROOT = Path(__file__).parents[1]
PROGRAM = (ROOT / "unit/support/rhel_qemu.py").read_text()
DEVICES = (ROOT / "data/rhel/devices.txt").read_text()
INSTALL = """set -e
cat > /usr/libexec/qemu-kvm
sed -i '1i #!/usr/bin/python3 -I' /usr/libexec/qemu-kvm
chmod 755 /usr/libexec/qemu-kvm
mv /usr/bin/qemu-system-x86_64 /usr/libexec/qemu-of-debian
mv /var/cache/libvirt /var/cache/libvirt.kept
"""
DAEMON = """
import os, socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind("/run/libvirt/virtqemud-sock")
os.chmod("/run/libvirt/virtqemud-sock", 0o600)
listener.listen(128)
if os.fork():
    sys.exit()
os.setsid()
os.dup2(listener.fileno(), 3)
os.set_inheritable(3, True)  # dup2 to itself does not
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS="1", LISTEN_FDNAMES="libvirtd.socket")
log = os.open("/var/log/virtqemud.log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
for fd in (0, 1, 2):
    os.dup2(log, fd)
os.execv("/usr/sbin/libvirtd", ["virtqemud", "--pid-file", "/run/virtqemud.pid"])
"""
RESTORE = """
[ ! -e /run/virtqemud.pid ] || kill "$(cat /run/virtqemud.pid)"
for _ in $(seq 100); do [ -e /run/virtqemud.pid ] || break; sleep 0.2; done
rm -f /run/libvirt/virtqemud-sock /usr/libexec/qemu-kvm /usr/libexec/qemu-kvm-devices
[ ! -e /usr/libexec/qemu-of-debian ] || mv /usr/libexec/qemu-of-debian /usr/bin/qemu-system-x86_64
[ -e /var/cache/libvirt.kept ] || exit 0
rm -rf /var/cache/libvirt
mv /var/cache/libvirt.kept /var/cache/libvirt
"""


@pytest.fixture
def rhel(lab: Lab, no_health_check: str) -> Iterator[None]:
    """n1 with the daemon and the QEMU; as before afterwards."""
    lab.service(NODE, "stop", "libvirtd")
    try:
        lab.run(NODE, "sh", "-c", INSTALL, stdin=PROGRAM)
        lab.run(NODE, "tee", "/usr/libexec/qemu-kvm-devices", stdin=DEVICES)
        lab.run(NODE, "python3", "-I", "-c", DAEMON)
        virsh = ("virsh", "-q", "-c", "qemu:///system", "version")
        until(lambda: lab.run(NODE, *virsh, check=False).code == 0, "an answer of virtqemud")
        yield
    finally:
        lab.run(NODE, "sh", "-c", RESTORE)
        lab.service(NODE, "start", "libvirtd")


@pytest.mark.usefixtures("rhel")
def test_a_job_runs_with_qemu_and_sockets_as_on_rhel(lab: Lab) -> None:
    sockets = lab.run(NODE, "sh", "-c", "ls /run/libvirt/*-sock*").out.split()
    assert "/run/libvirt/libvirt-sock" not in sockets
    assert "pc-q35-rhel9.6.0" in lab.run(NODE, "virsh", "-q", "-c", "qemu:///system", "capabilities").out
    found = {one["check"]: one for one in lab.vhpc(NODE, "doctor", check=False)}
    assert found["node.libvirt"]["level"] == "ok", found["node.libvirt"]
    asks = "srun sh -c 'cat /sys/class/dmi/id/product_name; ls -d ~ && touch ~/rhel-wrote'"
    job = lab.finish(asks, "-w", NODE)
    assert job.show()["JobState"] == "COMPLETED", job.output()
    assert lab.run(NODE, "test", "-e", "/home/alice/rhel-wrote").code == 0
    log = lab.run(NODE, "sh", "-c", f"cat /var/log/libvirt/qemu/vhpc-{job.id}-*.log").out
    assert "/usr/libexec/qemu-kvm" in log
    assert "pc-q35-rhel9.6.0" in log
    settled(lab)
