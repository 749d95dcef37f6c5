# SPDX-License-Identifier: Apache-2.0
"""X11 of steps in guests: a program reaches the display of the login host, through Slurm's own forwarding."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

import pytest
from cluster import IMAGE, NODES, Lab
from injection import settled, slurm_conf

from x11_programs import CLIENT, COOKIE, ENTRIES, SERVER, authority

pytestmark = pytest.mark.lab

FOLDER, DISPLAY = "/home/alice/x11", 10
HOSTS = ("ctl", "login", *NODES)
# slurmctld and slurmd refuse PrologFlags=X11 with proctrack/linuxproc, which the lab has.
SETTINGS = "s|^ProctrackType=.*|ProctrackType=proctrack/pgid|; s|^PrologFlags=.*|&,X11|"
XAUTH = "/usr/bin/xauth"
# The lab lacks xauth(1). Slurm calls: list DISPLAY; -v -f FILE source COMMANDS; -v -f FILE remove NAME.
XAUTH_STAND_IN = (
    f"#!/usr/bin/env python3\n{ENTRIES}"
    + """
import os, sys
words = [word for word in sys.argv[1:] if word != "-v"]
path = os.environ.get("XAUTHORITY") or os.path.expanduser("~/.Xauthority")
if words[0] == "-f":
    path, words = words[1], words[2:]

def entry(name, kind, cookie):
    host, _, display = name.partition("/unix:")
    fields = (host.encode(), display.encode(), kind.encode(), bytes.fromhex(cookie))
    return b"\\x01\\x00" + b"".join(len(text).to_bytes(2, "big") + text for text in fields)

known = list(entries(open(path, "rb").read())) if os.path.exists(path) else []
named = lambda found: f"{found[1].decode()}/unix:{found[2].decode()}"
if words[0] == "list":
    display = words[1].rpartition(":")[2].partition(".")[0]
    for found in known:
        if found[2].decode() == display:
            print(f"{named(found)}  {found[3].decode()}  {found[4].hex()}")
elif words[0] == "source":
    with open(words[1]) as commands, open(path, "ab") as file:
        for line in commands:
            file.write(entry(*line.split()[1:]))
else:
    kept = [found for found in known if named(found) != words[1]]
    with open(path, "wb") as file:
        file.writelines(entry(named(found), found[3].decode(), found[4].hex()) for found in kept)
"""
)


@pytest.fixture(scope="module")
def forwarding(lab: Lab) -> Iterator[None]:
    """A Slurm that forwards X11, and a display on the login host."""
    for host in HOSTS:
        add = f"test -e {XAUTH} || {{ cat >{XAUTH}; chmod 755 {XAUTH}; touch {XAUTH}.ours; }}"
        lab.run(host, "sh", "-ec", add, stdin=XAUTH_STAND_IN)
    known = authority(256, b"login", str(DISPLAY).encode(), b"MIT-MAGIC-COOKIE-1", COOKIE)
    files = f"""
mkdir -p {FOLDER}; cd {FOLDER}; umask 077
python3 -c 'open("authority", "wb").write(bytes.fromhex("{known.hex()}"))'
cat >client.py <<'END'
{CLIENT}
END
cat >server.py <<'END'
{SERVER}
END
setsid python3 server.py 127.0.0.1 {6000 + DISPLAY} >>heard 2>&1 </dev/null &
echo $! >pid
until grep listens heard; do sleep 0.2; done
"""
    lab.run("login", "sh", "-e", user="alice", stdin=files)
    with slurm_conf(lab, SETTINGS, restart=True):
        yield
    lab.run("login", "sh", "-c", f"kill $(cat {FOLDER}/pid); rm -rf {FOLDER}", user="alice")
    for host in HOSTS:
        lab.run(host, "sh", "-c", f"if rm {XAUTH}.ours 2>/dev/null; then rm {XAUTH}; fi")


def step(lab: Lab, *srun: str, terminal: bool = False, display: str = f"localhost:{DISPLAY}.0") -> list[str]:
    """Lines of a step's output, standard error included, without what srun says while the guest boots."""
    command = shlex.join(["srun", f"--vhpc-image={IMAGE}", "-N1", "--mem=768", *srun])
    if terminal:
        command = f"script -qec {shlex.quote(command)} /dev/null"
    setting = f"export DISPLAY={display} XAUTHORITY={FOLDER}/authority; cd {FOLDER}; {command} 2>&1"
    out = lab.run("login", "sh", "-c", setting, user="alice", timeout=300).out
    return [line for line in out.splitlines() if not line.startswith("srun: ")]


def heard(lab: Lab) -> list[str]:
    """Authorizations of clients since the last call."""
    read = f"cat {FOLDER}/heard; : >{FOLDER}/heard"
    return lab.run("login", "sh", "-c", read, user="alice").out.replace("listens\n", "").splitlines()


CONNECTED, RIGHT = r"setup b'\x01'", f"MIT-MAGIC-COOKIE-1 {COOKIE.hex()}"


@pytest.mark.promise("job.x11")
def test_steps_on_a_terminal_reach_the_users_display(lab: Lab, forwarding: None) -> None:
    nested = "python3 client.py one; srun --overlap python3 client.py two </dev/null; echo $XAUTHORITY"
    *said, file = step(lab, "--x11", "--pty", "sh", "-c", nested, terminal=True)
    # before it, lines about the boot, and echoes of the terminal
    shown = [line.lstrip("^@") for line in said if line]
    assert shown[-4:] == [CONNECTED, "ONE", CONNECTED, "TWO"], said
    assert file.startswith("/run/vhpc/x11.")
    assert heard(lab) == [RIGHT] * 2
    settled(lab)


@pytest.mark.promise("job.x11")
def test_tasks_in_two_guests_share_the_users_display(lab: Lab, forwarding: None) -> None:
    several = step(lab, "--x11", "-n2", "--mem=1536", "--vhpc-guests-per-node=2", "python3", "client.py", "x")
    assert sorted(several) == ["X"] * 2 + [CONNECTED] * 2
    assert heard(lab) == [RIGHT] * 2
    settled(lab)


@pytest.mark.promise("job.x11")
def test_a_step_without_x11_keeps_its_display(lab: Lab, forwarding: None) -> None:
    show = "echo $DISPLAY $XAUTHORITY; ls /run/vhpc; cat /proc/net/tcp"
    own, *rest = step(lab, "sh", "-c", show, display="localhost:20.0")
    assert own == f"localhost:20.0 {FOLDER}/authority"
    assert [line for line in rest if re.search(r"x11|:17[89A-D]\w [0-9A-F]+:0000 0A", line)] == []
    assert heard(lab) == []
    settled(lab)
