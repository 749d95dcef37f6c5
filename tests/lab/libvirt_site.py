# SPDX-License-Identifier: Apache-2.0
"""A libvirtd with Debian's default settings, started as systemd starts it; runs as root on a node of the lab.

    unshare --mount python libvirt_site.py open|closed

It has folders of its own.  Its sockets get the modes of Debian's units, with "closed" after the steps of
`vhpc setup node`.  A job's user then holds as many connections as he gets, and vhpc connects.
"""

from __future__ import annotations

import ctypes
import json
import re
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

UNITS = ("libvirtd.socket", "libvirtd-ro.socket", "libvirtd-admin.socket")
ALICE = "2001"
# libvirtd takes 20 clients that have not authenticated, and 5,000 in all; others wait, about 1,000
IDLE = {"libvirt-sock": 60, "libvirt-sock-ro": 5100}
CONNECT_S = 20.0
START_S = 120.0
DAEMON = """
exec >/run/libvirt/log 2>&1
for fd in 3 4 5; do eval "exec $fd<&\\$$((fd - 2))"; done
export LISTEN_PID=$$ LISTEN_FDS=3 LISTEN_FDNAMES=libvirtd.socket:libvirtd-ro.socket:libvirtd-admin.socket
exec /usr/sbin/libvirtd --config /run/libvirt/default.conf --pid-file /run/libvirt/own.pid
"""
HOLD = """
import socket, sys
held, why = [], ""
for _ in range(int(sys.argv[2])):
    one = socket.socket(socket.AF_UNIX)
    one.settimeout(5)
    try:
        one.connect(sys.argv[1])
    except OSError as err:
        why = type(err).__name__
        break
    held.append(one)
print(len(held), why, flush=True)
sys.stdin.read()
"""


def separate() -> None:
    """Folders that the node's own libvirtd does not use."""
    libc = ctypes.CDLL(None, use_errno=True)
    for folder in ("/run", "/var/lib/libvirt", "/etc/systemd/system"):
        if libc.mount(b"none", folder.encode(), b"tmpfs", 0, b"mode=755") != 0:
            raise OSError(ctypes.get_errno(), f"mount {folder}")
    for folder in ("/run/libvirt", "/run/systemd/system", "/var/lib/libvirt/qemu"):
        Path(folder).mkdir(parents=True, exist_ok=True)


def setup() -> None:
    """The step of `vhpc setup node` that closes the sockets."""
    from vhpc_slurm.cli.host import setup

    place = setup.Place(systemctl="/bin/true")
    (step,) = setup._libvirt_sockets(place, dry_run=False)
    assert step.state.value == "done", step


def mode_of(unit: str) -> int:
    """The mode that systemd gives the unit's socket; systemd.unit(5): drop-ins come after the unit."""
    files = [Path("/usr/lib/systemd/system") / unit, *sorted(Path(f"/etc/systemd/system/{unit}.d").glob("*"))]
    text = "".join(one.read_text() for one in files)
    return int(re.findall(r"^SocketMode=(\d+)$", text, re.MULTILINE)[-1], 8)


@contextmanager
def libvirtd() -> Iterator[None]:
    """libvirtd with its default settings, which are those of an empty file, and sockets of its units."""
    Path("/run/libvirt/default.conf").touch()
    listeners = []
    for unit in UNITS:
        text = (Path("/usr/lib/systemd/system") / unit).read_text()
        (path,) = re.findall(r"^ListenStream=(\S+)$", text, re.MULTILINE)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        Path(path).chmod(mode_of(unit))
        listener.listen(4096)  # as Backlog= of systemd
        listeners.append(listener)
    fds = [listener.fileno() for listener in listeners]
    daemon = subprocess.Popen(["bash", "-ec", DAEMON, "bash", *map(str, fds)], pass_fds=fds)
    for listener in listeners:
        listener.close()
    try:
        yield
    finally:
        daemon.terminate()
        try:
            daemon.wait(30)
        except subprocess.TimeoutExpired:
            daemon.kill()


def connect() -> str:
    """vhpc's findings."""
    from vhpc_slurm.errors import NodeError
    from vhpc_slurm.node.guest import libvirtd as ours

    try:
        with ours.connect("qemu:///system", CONNECT_S) as hypervisor:
            hypervisor.version()
    except NodeError as err:
        return f"{type(err).__name__}: {err.line()}"
    return "connected"


def attack(name: str, count: int) -> dict[str, object]:
    """Hold idle connections as the user, and connect meanwhile."""
    user = ("setpriv", "--reuid", ALICE, "--regid", ALICE, "--clear-groups")
    hold = subprocess.Popen(
        [*user, sys.executable, "-I", "-c", HOLD, f"/run/libvirt/{name}", str(count)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert hold.stdin is not None
    assert hold.stdout is not None
    held, _, why = hold.stdout.readline().strip().partition(" ")
    time.sleep(2)
    found = connect()
    hold.stdin.close()
    hold.wait(60)
    return {"held": int(held), "why": why, "vhpc": found}


def main(how: str) -> int:
    """Print what each attack gets, and what vhpc finds meanwhile, as JSON."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (8192, 8192))
    separate()
    if how == "closed":
        setup()
    with libvirtd():
        until = time.monotonic() + START_S
        while (first := connect()) != "connected" and time.monotonic() < until:
            time.sleep(1)
        found: dict[str, object] = {"before": first}
        for name, count in IDLE.items():
            found[name] = attack(name, count)
        found["log"] = Path("/run/libvirt/log").read_text(errors="replace")[-2000:]
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
