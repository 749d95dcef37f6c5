# SPDX-License-Identifier: Apache-2.0
"""Messages of the controller's hooks, which run as SlurmUser, are in the syslog of slurmctld's host."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
from cluster import Lab
from injection import settled, until

pytestmark = pytest.mark.lab

SAID = "/tmp/syslog-of-a-test"
# The hosts of the lab have no syslog; this takes its place, open to all users as Debian's is.
SYSLOG = f"""
import os, socket
taken = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
taken.bind("/dev/log")
os.chmod("/dev/log", 0o666)
with open("{SAID}", "w") as said:
    while True:
        print(taken.recv(65536).decode(errors="replace"), file=said, flush=True)
"""


def said(lab: Lab, pattern: str) -> bool:
    return lab.run("ctl", "grep", "-Ec", f"^<[0-9]+>{pattern}", SAID, check=False).code == 0


@pytest.fixture
def syslog(lab: Lab) -> Iterator[None]:
    start = "cat >/tmp/syslog.py; exec setsid python3 /tmp/syslog.py >/dev/null 2>&1 & echo $!"
    pid = lab.run("ctl", "sh", "-ec", f"test ! -e /dev/log; {start}", stdin=SYSLOG).out.strip()
    try:
        until(lambda: lab.run("ctl", "test", "-e", SAID, check=False).code == 0, "syslog")
        yield
    finally:
        lab.run("ctl", "sh", "-c", f"kill {pid}; rm -f /dev/log {SAID} /tmp/syslog.py", check=False)


@pytest.mark.usefixtures("syslog")
def test_messages_of_the_controllers_hooks_are_in_syslog(lab: Lab) -> None:
    job = lab.submit("true", image="no-such-image")
    assert job.wait("FAILED") == "FAILED"
    lab.service("ctl", "stop", "vhpcd")
    lost = lab.submit("true", "-w", "n1")
    wanted = (
        rf"vhpc-prolog-slurmctld\[[0-9]+\]: job {job.id}: INFO lease {job.id}\..* refused",
        rf"vhpc-prolog-slurmctld\[[0-9]+\]: job {lost.id}: ERROR vhpcd at .* does not answer",
    )
    try:
        for pattern in wanted:
            until(partial(said, lab, pattern), pattern, 180)
    finally:
        lab.run("login", "scancel", str(lost.id), user="alice")
        lab.service("ctl", "start", "vhpcd")
    settled(lab)
