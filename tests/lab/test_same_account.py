# SPDX-License-Identifier: Apache-2.0
"""An account as a directory service has it, and the node's time zone: in a guest as outside of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import IMAGE, Job, Lab
from twins import nodes_in_zone

USER, UID = "jo doe", 2077
GROUPS = {
    1073741825: "domain users",
    1073741826: "EXAMPLE\\ops, dev/test",
    1073741827: "grün.team@example.org",
    1073741828: "g" * 200,
}
MANY = {2147483000 + number: f"project{number}" for number in range(120)}
ZONE = Path("/usr/share/zoneinfo/Asia/Kolkata")
# No other program has these: what a job finds is compared as a whole.
SCRIPT = """
id | tr ',' '\\n' | sort
id -Gn | wc -c
id -gn
echo "$USER|$LOGNAME|$HOME|$PWD"
getent passwd "$(id -u)" | cut -d: -f1,3-6
stat -c '%a|%U|%G|%F' "$HOME"
date -d @1700000000 '+%H:%M %z %Z'
TZ=UTC date -d @1700000000 '+%H:%M %z'
echo "$TMPDIR"; cd "$TMPDIR" && stat -c '%a|%U' . && : > "$(mktemp)" && ls | wc -l
srun sh -c 'stat -c "%a|%U" "$TMPDIR" && mktemp > /dev/null && echo made'
"""

pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(not ZONE.exists(), reason="needs time zones: apt install tzdata"),
]


@pytest.fixture(scope="module")
def account(lab: Lab) -> Iterator[str]:
    """A user with odd names on all hosts."""
    lines = [f"{name}:x:{gid}:{USER}" for gid, name in (GROUPS | MANY).items()]
    passwd = f"{USER}:x:{UID}:1073741825:Jo Doe,Room 7:/home/{USER}:/bin/bash"
    hosts = ("ctl", "login", *lab.nodes)
    for host in hosts:
        lab.run(host, "sh", "-c", "cat >> /etc/group", stdin="\n".join([*lines, ""]))
        lab.run(host, "sh", "-c", "cat >> /etc/passwd", stdin=f"{passwd}\n")
    lab.run("login", "install", "-d", "-m", "700", "-o", str(UID), "-g", "1073741825", f"/home/{USER}")
    with nodes_in_zone(lab, ZONE):
        yield USER
    lab.run("login", "rm", "-rf", f"/home/{USER}")
    for node in lab.nodes:
        lab.run(node, "rm", "-rf", "/tmp/of the job")
    for host in hosts:
        lab.run(host, "sed", "-i", f"/^{USER}:/d", "/etc/passwd")
        lab.run(host, "sed", "-i", f"/:{USER}$/d", "/etc/group")


@pytest.fixture(scope="module")
def twins(lab: Lab, account: str) -> tuple[Job, Job]:
    inside, outside = (
        lab.submit(SCRIPT, "--export=ALL,TMPDIR=/tmp/of the job", user=account, image=image)
        for image in (IMAGE, None)
    )
    inside.wait(timeout=400)
    outside.wait()
    return inside, outside


@pytest.mark.results
def test_a_job_of_an_odd_account_finds_the_same(twins: tuple[Job, Job]) -> None:
    ours, theirs = (job.output() for job in twins)
    assert ours == theirs
    assert "1073741825(domain users)" in ours
    assert "\n03:43 +0530 IST\n22:13 +0000\n" in ours
    assert ours.endswith("/tmp/of the job\n700|jo doe\n1\n700|jo doe\nmade\n")


def test_device_nodes_have_the_modes_of_udev(lab: Lab) -> None:
    job = lab.finish("stat -c '%n %a %U %G' /dev/fuse /dev/null /dev/ptmx; exec 3<>/dev/fuse && echo opened")
    assert job.output().splitlines() == [
        "/dev/fuse 666 root root",
        "/dev/null 666 root root",
        "/dev/ptmx 666 root root",
        "opened",
    ]
