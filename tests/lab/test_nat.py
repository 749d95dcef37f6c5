# SPDX-License-Identifier: Apache-2.0
"""Guests with nat: they reach the outside, nothing of the site, and leave nothing.

The login host plays the outside: it has addresses of a documentation network (RFC 5737), and
the nodes have a route to it. Its address on the lab's network, the other hosts and the node
itself stand for the site.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from cluster import IMAGE, NODES, Job, Lab
from frames import SEND
from injection import in_boot, kill_qemu, let_go, one_line, runs, said, settled, until
from lab_job import LabJob

from by_hand import KILLED

pytestmark = pytest.mark.lab

NAT = "--vhpc-network=nat"
OUTSIDE, DNS = "203.0.113.5", "203.0.113.53"
"""Addresses of the login host; the second is network.nat_dns of the lab."""
OWN = "203.0.113.11"
"""An address of n1 that looks like one of the outside."""
PORT = 8099

# Answers TCP and UDP on all addresses of a host, and notes each UDP datagram, and each connection.
SERVER = """
import socket, struct, sys, threading
port, name = int(sys.argv[1]), sys.argv[2]
tcp = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
tcp.bind(("", port))
tcp.listen(64)
def note(line):
    with open("/tmp/heard", "a") as out:
        print(line, file=out, flush=True)
def serve_udp(address):
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    udp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    udp.bind((address, port))
    while True:
        data, peer = udp.recvfrom(2048)
        note("udp " + data.decode(errors="replace"))
        udp.sendto(b"udp of " + name.encode(), peer)
def serve_dns():
    dns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    dns.bind(("203.0.113.53", 53))
    while True:
        data, peer = dns.recvfrom(512)
        end = data.index(b"\\0", 12) + 5
        found = data[end - 4:end - 2] == b"\\0\\1"
        head = data[:2] + b"\\x81\\x80\\0\\1" + (b"\\0\\1" if found else b"\\0\\0") + b"\\0\\0\\0\\0"
        answer = b"\\xc0\\x0c\\0\\1\\0\\1\\0\\0\\0\\1\\0\\4" + bytes([203, 0, 113, 5]) if found else b""
        dns.sendto(head + data[12:end] + answer, peer)
threading.Thread(target=serve_udp, args=("",), daemon=True).start()
if name == "login":
    # answers have to come from the address that was asked
    threading.Thread(target=serve_udp, args=("203.0.113.5",), daemon=True).start()
    threading.Thread(target=serve_dns, daemon=True).start()
note("ready")
while True:
    connection, _ = tcp.accept()
    note("tcp")
    connection.sendall(b"tcp of " + name.encode())
    connection.close()
"""
# Asks each ADDRESS:PORT by TCP and UDP, at once; prints who answered.
ASK = """
import socket, sys, threading
word, targets = sys.argv[1], sys.argv[2:]
def tcp(address, port):
    with socket.create_connection((address, port), timeout=8) as sock:
        sock.settimeout(8)
        return sock.recv(100).decode(errors="replace") or "connected"
def udp(address, port):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        sock.settimeout(2)
        for _ in range(4):  # a datagram may be lost
            sock.sendto(word.encode(), (address, port))
            try: return sock.recv(100).decode(errors="replace")
            except TimeoutError: pass
        raise TimeoutError
def ask(way, target):
    address, port = target.rsplit(":", 1)
    try:
        print("answer", way.__name__, target, way(address, int(port)).split("\\n")[0], flush=True)
    except OSError:
        pass
threads = [threading.Thread(target=ask, args=(way, one)) for one in targets for way in (tcp, udp)]
for one in threads: one.start()
for one in threads: one.join()
print("asked", len(targets), flush=True)
"""


@pytest.fixture(scope="module", autouse=True)
def outside(lab: Lab) -> Iterator[None]:
    """Hosts with servers, and addresses of the outside on the login host."""
    if not lab.has_nat():
        pytest.skip(
            "nat needs passt 2024_11_27 or newer: use the lab of Debian 13 (lab/vlab up --suite trixie)"
        )
    for address in (OUTSIDE, DNS):
        lab.run("login", "ip", "address", "replace", f"{address}/32", "dev", "lo")
    lab.run("n1", "ip", "address", "replace", f"{OWN}/32", "dev", "lo")
    for node in NODES:
        lab.run(node, "ip", "route", "replace", "203.0.113.0/24", "via", "10.77.0.3")
    pids = {}
    for host in ("login", "ctl", *NODES):
        script = (
            "rm -f /tmp/heard; cat > /tmp/server.py;"
            f" setsid python3 /tmp/server.py {PORT} {host} </dev/null >/tmp/server.log 2>&1 & echo $!"
        )
        pids[host] = lab.run(host, "sh", "-c", script, stdin=SERVER).out.strip()
        until(partial(heard, lab, host), f"the server of {host}", 20)
    lab.run("login", "sh", "-c", "cat > /home/alice/ask.py", user="alice", stdin=ASK)
    yield
    for host, pid in pids.items():
        lab.run(host, "kill", pid, check=False)
    for node in NODES:
        lab.run(node, "ip", "route", "del", "203.0.113.0/24", check=False)
    lab.run("n1", "ip", "address", "del", f"{OWN}/32", "dev", "lo", check=False)
    for address in (OUTSIDE, DNS):
        lab.run("login", "ip", "address", "del", f"{address}/32", "dev", "lo", check=False)


def heard(lab: Lab, host: str) -> list[str]:
    """The notes of the server on a host."""
    return lab.run(host, "cat", "/tmp/heard", check=False).out.splitlines()


def answers(text: str) -> set[str]:
    return {line.removeprefix("answer ") for line in text.splitlines() if line.startswith("answer")}


@pytest.mark.promise("nat.reach")
def test_guests_reach_the_outside_and_resolve_names(lab: Lab) -> None:
    job = lab.finish(
        f"python3 ~/ask.py hello {OUTSIDE}:{PORT}\n"
        "getent ahostsv4 www.example.org | head -1\n"
        "ip -o link show | cut -d: -f2; ip -6 address show dev nat0\n",
        *("-w", "n1", NAT, "--chdir=/home/alice"),
    )
    lines = job.output().splitlines()
    assert answers(job.output()) == {f"{way} {OUTSIDE}:{PORT} {way} of login" for way in ("tcp", "udp")}
    assert f"{OUTSIDE}     STREAM www.example.org" in [line.rstrip() for line in lines], lines
    assert lines[-2:] == [" lo", " nat0"], lines


@pytest.mark.promise("nat.deny", "attack.nat-node")
def test_nothing_of_the_site_answers_a_guest(lab: Lab) -> None:
    """The root of a guest asks everything that answers a process of the same user on the same node."""
    site = [f"10.77.0.{number}:{PORT}" for number in (2, 3, 11, 12)]  # controller, login, nodes
    services = ["10.77.0.11:6818", "10.77.0.12:6818", "10.77.0.2:6817", "10.77.0.2:7633"]
    node = [f"{OWN}:{PORT}", f"127.0.0.1:{PORT}", f"10.201.0.1:{PORT}", f"0.0.0.0:{PORT}"]
    others = [f"10.77.0.255:{PORT}", f"255.255.255.255:{PORT}", f"224.0.0.1:{PORT}", "10.77.0.12:7634"]
    targets = [*site, *services, *node, *others, f"{OUTSIDE}:{PORT}"]
    host = lab.run("n1", "python3", "/home/alice/ask.py", "from-host", *targets, user="alice").out
    reached = {line.split()[1] for line in answers(host) if line.startswith("tcp")}
    assert {*site, f"{OWN}:{PORT}", f"127.0.0.1:{PORT}", f"{OUTSIDE}:{PORT}"} <= reached, "the control"
    for service in services:  # they close connections that do not speak their protocol, or wait
        address, port = service.split(":")
        script = f"import socket; socket.create_connection(({address!r}, {port}), 8)"
        lab.run("n1", "python3", "-c", script, user="alice")
    job = lab.finish(
        f"sudo python3 ~/ask.py from-guest {' '.join(targets)}\n"
        # from another source address, and by a route that avoids the gateway
        "sudo ip address add 10.77.0.99/24 dev nat0\n"
        f"sudo python3 ~/ask.py from-guest-again {' '.join(site)} {OWN}:{PORT}\n"
        "for n in 2 3 11 12; do ping -c1 -W2 10.77.0.$n >/dev/null && echo answer ping $n; done; true\n",
        *("-w", "n1", NAT, "--chdir=/home/alice"),
    )
    assert job.output().count("asked") == 2, job.output()
    assert answers(job.output()) == {f"{way} {OUTSIDE}:{PORT} {way} of login" for way in ("tcp", "udp")}
    words = {host: [line for line in heard(lab, host) if "from-guest" in line] for host in ("ctl", *NODES)}
    assert words == {"ctl": [], "n1": [], "n2": []}
    assert {line for line in heard(lab, "login") if "from-guest" in line} == {"udp from-guest"}


@pytest.mark.promise("nat.reach")
def test_a_job_may_have_both_networks(lab: Lab) -> None:
    job = lab.finish(
        "cat > ~/both.sh <<'END'\n"
        f'python3 ~/ask.py both {OUTSIDE}:{PORT} | sed "s/^/$(hostname) /"\n'
        "for name in n1 n2; do ping -c1 -W20 $name >/dev/null && echo $(hostname) reached $name; done\n"
        "ping -c1 -W2 10.77.0.11 >/dev/null && echo reached the node\n"
        "END\n"
        "srun -N2 --ntasks-per-node=1 sh ~/both.sh\n",
        *("-N2", "--vhpc-network=nat,job", "--chdir=/home/alice"),
    )
    lines = job.output().splitlines()
    for node in NODES:
        assert f"{node} answer tcp {OUTSIDE}:{PORT} tcp of login" in lines, lines
        assert {f"{node} reached n1", f"{node} reached n2"} <= set(lines), lines
    assert "reached the node" not in lines


@pytest.mark.promise("nat.reach")
def test_each_guest_of_a_node_has_its_own_passt(lab: Lab) -> None:
    job = lab.finish(
        f"srun -n2 sh -c 'python3 ~/ask.py two {OUTSIDE}:{PORT} 10.77.0.11:{PORT} |"
        ' sed "s/^/$(hostname) /"\'',
        *("-w", "n1", "-n2", NAT, "--vhpc-guests-per-node=2", "--chdir=/home/alice"),
    )
    found = {line for line in job.output().splitlines() if " answer " in line}
    assert found == {
        f"n1-g{index} answer {way} {OUTSIDE}:{PORT} {way} of login"
        for index in (0, 1)
        for way in ("tcp", "udp")
    }


# --- the job's user on the node -----------------------------------------------------------------------

WAIT = (
    "echo up; until [ -e ~/go-$SLURM_JOB_ID ]; do sleep 0.2; done;"
    f" python3 ~/ask.py late {OUTSIDE}:{PORT} 10.77.0.11:{PORT}"
)


# Runs as the job's user on the node, outside of the guest: PID GID FOLDER of his passt.
TRIALS = """
import ctypes, os, socket, sys
pid, gid, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
libc = ctypes.CDLL(None, use_errno=True)
def check(result):
    if result < 0: raise OSError(ctypes.get_errno(), "")
def connect():
    with socket.socket(socket.AF_UNIX) as sock: sock.connect(folder + "/socket")
def trial(name, act):
    try: act()
    except OSError as err: print(name, "refused:", os.strerror(err.errno))
    else: print(name, "DONE")
trial("connect", connect)
trial("list", lambda: os.open(folder + "/socket", os.O_RDWR))
trial("replace", lambda: os.unlink(folder + "/socket"))
trial("ptrace", lambda: check(libc.ptrace(16, pid, None, None)))
trial("memory", lambda: open(f"/proc/{pid}/mem", "rb"))
trial("root", lambda: os.listdir(f"/proc/{pid}/root/"))
trial("descriptors", lambda: os.listdir(f"/proc/{pid}/fd"))
trial("pidfd_getfd", lambda: check(libc.syscall(438, os.pidfd_open(pid), 5, 0)))
trial("gid", lambda: os.setgid(gid))
trial("groups", lambda: os.setgroups([gid]))
"""


@pytest.fixture
def running(lab: Lab) -> Iterator[Job]:
    """A job of alice on n1, whose guest has nat."""
    job = lab.submit(WAIT, "-w", "n1", NAT, "--chdir=/home/alice")
    runs(lab, job)
    yield job
    lab.run("ctl", "scancel", str(job.id), check=False)
    job.wait()
    lab.quiet()


@pytest.mark.promise("nat.user", "attack.nat-passt", "attack.nat-socket")
def test_the_user_cannot_use_or_change_the_own_passt(lab: Lab, running: Job) -> None:
    pid = lab.run("n1", "pgrep", "-u", "alice", "passt").out.split()[0]
    gid = lab.run("n1", "sh", "-c", f"awk '/^Gid/ {{print $2}}' /proc/{pid}/status").out.strip()
    folder = f"/run/vhpc/jobs/{running.id}/g0/nat"
    out = lab.run("n1", "python3", "-c", TRIALS, pid, gid, folder, user="alice").out
    assert "DONE" not in out, out
    assert out.count("refused") == 10, out
    status = lab.run("n1", "cat", f"/proc/{pid}/status").out
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert fields["NoNewPrivs"] == "1"
    assert int(fields["CapEff"], 16) == int(fields["CapPrm"], 16) == 0
    assert fields["Groups"].split() in ([], [gid])
    cgroup = lab.run("n1", "cat", f"/proc/{pid}/cgroup").out
    assert f"vhpc.partition/{running.id}.0." in cgroup, cgroup
    let_go(lab, running)
    assert running.wait() == "COMPLETED"
    assert answers(running.output()) == {f"{way} {OUTSIDE}:{PORT} {way} of login" for way in ("tcp", "udp")}


def filters_of_nat(lab: Lab) -> str:
    """The ruleset of n1 without the node's own table, which is there after a job with a job network."""
    text = lab.run("n1", "nft", "list", "ruleset").out
    return re.sub(r"table inet vhpc-port {.*?^}\n", "", text, flags=re.MULTILINE | re.DOTALL)


def of_nat(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Findings without the one about the node's own table."""
    return [one for one in found if "vhpc-port" not in one["what"]]


@pytest.mark.promise("nat.flush", "nat.release")
@pytest.mark.usefixtures("no_health_check")
def test_a_lost_table_is_found_and_made_again(lab: Lab, running: Job) -> None:
    before = filters_of_nat(lab)
    assert f"vhpcnat_{running.id}.0." in before
    lab.run("n1", "nft", "flush", "ruleset")
    # the copy of the table still drops what a process with passt's gid sends to the site
    (gid,) = set(re.findall(r"meta skgid (\d+)", before))
    for number, said_ in ((gid, "refused"), (str(int(gid) + 1), "sent")):
        drop_to = ("setpriv", "--regid", number, "--clear-groups")
        assert lab.run("n1", *drop_to, "python3", "-c", SEND, "10.77.0.2", "9", "00").out.strip() == said_
    found = of_nat(lab.vhpc("n1", "reconcile", "--check", check=False))
    assert [one["kind"] for one in found] == ["firewall"], found
    repaired = of_nat(lab.vhpc("n1", "reconcile", check=False))
    assert [one["repaired"] for one in repaired] == [True], repaired
    lab.run("n1", "pkill", "-KILL", "-x", "nft")
    repaired = lab.vhpc("n1", "reconcile", check=False)
    assert ["keeps a copy" in one["what"] and one["repaired"] for one in repaired] == [True], repaired
    assert lab.vhpc("n1", "reconcile", "--check") == []
    assert filters_of_nat(lab).count("drop") == before.count("drop")
    let_go(lab, running)
    assert running.wait() == "COMPLETED"
    assert answers(running.output()) == {f"{way} {OUTSIDE}:{PORT} {way} of login" for way in ("tcp", "udp")}


@pytest.mark.promise("nat.release", "attack.nat-end")
@pytest.mark.parametrize("who", ["passt", "qemu"])
def test_a_killed_process_ends_the_job_and_leaves_nothing(lab: Lab, running: Job, who: str) -> None:
    if who == "passt":
        lab.run("n1", "pkill", "-KILL", "-u", "alice", "passt")
    else:
        kill_qemu(lab, running, "n1")
    assert running.wait() == "FAILED"
    one_line(running, r"^vhpc: the guest of job \d+ on n1 is gone")
    settled(lab)


@pytest.mark.promise("attack.nat-end")
def test_a_passt_killed_in_a_boot_is_named_as_the_cause(lab: Lab) -> None:
    job = lab.submit("echo up", "-w", "n1", NAT)
    in_boot(lab, job, "n1", "pkill -9 -n passt")
    assert job.wait() == "FAILED"
    one_line(job, r"^vhpc: passt, which the guest needs, was ended by a signal on n1 while .*: SIGKILL")
    settled(lab)


@pytest.mark.promise("nat.release")
@pytest.mark.parametrize("torn", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_prolog_killed_around_nat_leaves_nothing(lab: Lab, torn: bool) -> None:
    """The Epilog clears what a Prolog left that was killed at any of its writes since the filter's."""
    tried = 0
    for number in itertools.count(4):
        job = LabJob(lab, network="nat")
        try:
            code = job.drive(str(number), *(["torn"] if torn else []), check=False).code
            assert code == KILLED
            journal = lab.run("n1", "sh", "-c", "cat /var/lib/vhpc/journal/*", check=False).out
            tried += '"kind":"nat"' in journal
            job.hook("epilog")
            job.clean()
        finally:
            job.drive("end")
        if tried == 4:
            return


@pytest.mark.promise("clean.epilog", "nat.release")
@pytest.mark.usefixtures("no_health_check")
def test_reconcile_ends_processes_of_a_killed_epilog(lab: Lab) -> None:
    """While Slurm still runs the job there."""
    job = LabJob(lab, network="nat", known=True)
    try:
        job.hook("prolog")
        for kind in ("process", "nat"):  # the guest is powered off before the first release
            job.interrupt_epilog(kind)
        lab.vhpc("n1", "reconcile", check=False)
        job.clean()
    finally:
        job.end()


@pytest.mark.promise("nat.refuse")
def test_a_node_without_a_usable_passt_refuses_nat(lab: Lab) -> None:
    """passt that is too old ends with its usage; then no guest runs, and Slurm drains the node."""
    old = "#!/bin/sh\necho 'unrecognized option --vhost-user' >&2; exit 1\n"
    lab.run("n1", "sh", "-c", "cat > /root/old-passt; chmod 755 /root /root/old-passt", stdin=old)
    lab.run("n1", "mount", "--bind", "/root/old-passt", "/usr/bin/passt")
    try:
        job = lab.submit("echo up", "-w", "n1", NAT)
        until(lambda: "DRAIN" in lab.node_state("n1")[0], "the node to be drained")
        assert "passt ended" in lab.node_state("n1")[1], lab.node_state("n1")
        lab.run("ctl", "scancel", str(job.id))
        job.wait()
        assert "up" not in said(lab, job)
    finally:
        lab.run("n1", "umount", "/usr/bin/passt")
        lab.quiet()
        lab.resume("n1")


def test_a_network_that_the_site_does_not_allow_is_refused(lab: Lab) -> None:
    done = lab.run(
        "login",
        *("sbatch", f"--vhpc-image={IMAGE}", "--vhpc-network=nat,nat", "--wrap=true"),
        user="alice",
        check=False,
    )
    assert done.code != 0
    assert "--vhpc-network=nat,nat: 'none' or a list of 'job', 'multicast', 'nat' and 'site' is" in done.err
