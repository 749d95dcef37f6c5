# SPDX-License-Identifier: Apache-2.0
"""Job networks: guests reach each other, no other host or guest reaches them, and nothing is left of them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import pytest
from cluster import IMAGE, NODES, Job, Lab
from frames import SEND, SNIFF, SPOOF, mac, vxlan
from injection import let_go, until
from lab_job import LabJob

from by_hand import KILLED

pytestmark = pytest.mark.lab

JOB = "--vhpc-network=job"
OVERHEAD = 50
"""Bytes that VXLAN adds over IPv4: RFC 7348."""
PORT = 7634
MARK = b"marked-"


def vni_of(lab: Lab, node: str = "n1") -> set[int]:
    """VNIs of the bridges on a node."""
    names = lab.run(node, "ip", "-o", "link").out
    return {int(number) for number in re.findall(r"\bvhpcb([0-9]+)", names)}


def traces(lab: Lab) -> list[str]:
    """Objects of job networks on the nodes."""
    found = []
    for node in NODES:
        script = "ip -o link | grep -o '^[0-9]*: vhpc[^:]*'; nft list tables | grep vhpc_"
        found += [
            f"{node} {line}" for line in lab.run(node, "sh", "-c", script, check=False).out.splitlines()
        ]
    return found


# --- what users get ---------------------------------------------------------------------------------


@pytest.mark.promise("net.reach")
def test_guests_of_two_nodes_reach_each_other_at_full_mtu(lab: Lab) -> None:
    mtu = int(lab.run("n1", "cat", "/sys/class/net/eth0/mtu").out) - OVERHEAD
    job = lab.finish(
        "echo names $VHPC_NODELIST\n"
        "cat > ~/talk.sh <<'END'\n"
        "for name in $(echo $VHPC_NODELIST | tr , ' '); do\n"
        f"  ping -4 -c1 -W20 -M do -s {mtu - 28} $name >/dev/null && echo $(hostname) v4 $name\n"
        f"  ping -6 -c1 -W20 -M do -s {mtu - 48} $name >/dev/null && echo $(hostname) v6 $name\n"
        f"  [ $name = $(hostname) ] || ping -4 -c1 -W5 -M do -s {mtu - 27} $name 2>&1 | grep ' 0% '\n"
        "done\n"
        "ip route show default; ip -6 route show default\n"
        "ping -c1 -W2 10.77.0.11 >/dev/null 2>&1 && echo reached the node\n"
        "ping -c1 -W2 10.77.0.2 >/dev/null 2>&1 && echo reached the controller\n"
        "echo $(hostname) mtu $(cat /sys/class/net/vhpc0/mtu)\n"
        "END\n"
        "srun -N2 --ntasks-per-node=1 sh talk.sh\n",
        "-N2",
        JOB,
        "--chdir=/home/alice",
    )
    assert sorted(job.output().splitlines()) == sorted(
        [
            "names n1,n2",
            *(f"{one} {version} {other}" for one in NODES for version in ("v4", "v6") for other in NODES),
            *(f"{one} mtu {mtu}" for one in NODES),
        ]
    )


STREAM = """
import hashlib, os, socket, sys, time
here, peers, size = socket.gethostname(), os.environ["VHPC_NODELIST"].split(","), 8 << 20
for family, port in ((socket.AF_INET, 5001), (socket.AF_INET6, 5002)):
    if here == peers[0]:
        data = os.urandom(size)
        server = socket.create_server(("", port), family=family)
        server.settimeout(60)
        other, _ = server.accept()
        other.sendall(hashlib.sha256(data).digest() + data)
        other.shutdown(socket.SHUT_WR)
        other.recv(1)
        continue
    (place,) = {one[4] for one in socket.getaddrinfo(peers[0], port, family, socket.SOCK_STREAM)}
    until = time.time() + 60
    while True:
        try:
            link = socket.create_connection(place[:2], timeout=30)
            break
        except ConnectionRefusedError:
            assert time.time() < until
            time.sleep(0.2)
    got = b"".join(iter(lambda: link.recv(1 << 20), b""))
    link.close()
    print(family.name, len(got), hashlib.sha256(got[32:]).digest() == got[:32], flush=True)
"""


@pytest.mark.promise("net.reach")
def test_streams_between_guests_arrive_whole(lab: Lab) -> None:
    """TCP with all the offloads that virtio, VXLAN and the underlay agree on."""
    lab.run("login", "sh", "-c", "cat > stream.py", user="alice", stdin=STREAM)
    script = "srun -N2 --ntasks-per-node=1 python3 ~/stream.py"
    job = lab.finish(script, "-N2", JOB, "--chdir=/home/alice")
    assert job.output() == f"AF_INET {(8 << 20) + 32} True\nAF_INET6 {(8 << 20) + 32} True\n"


@pytest.mark.promise("net.reach")
def test_guests_of_one_node_reach_each_other(lab: Lab) -> None:
    job = lab.finish(
        "srun -n2 sh -c 'for name in n1-g0 n1-g1; do ping -4 -c1 -W20 $name >/dev/null &&"
        " ping -6 -c1 -W20 $name >/dev/null && echo $(hostname) $name; done'",
        "-w",
        "n1",
        "-n2",
        "--vhpc-guests-per-node=2",
        JOB,
    )
    assert sorted(job.output().splitlines()) == ["n1-g0 n1-g0", "n1-g0 n1-g1", "n1-g1 n1-g0", "n1-g1 n1-g1"]


@pytest.mark.promise("net.reach")
def test_a_job_that_does_not_ask_has_no_network(lab: Lab) -> None:
    for options in ((), ("--vhpc-network=none",)):
        job = lab.finish("ls /sys/class/net; echo list $VHPC_NODELIST", "-n1", "-w", "n1", *options)
        assert job.output() == "lo\nlist\n"


def test_a_network_that_there_is_not_is_refused_at_submission(lab: Lab) -> None:
    done = lab.run(
        "login",
        *("sbatch", f"--vhpc-image={IMAGE}", "--vhpc-network=wan", "--wrap=true"),
        user="alice",
        check=False,
    )
    assert done.code != 0
    assert "--vhpc-network=wan: 'none' or a list of 'job', 'multicast', 'nat' and 'site' is" in done.err


# --- what others get --------------------------------------------------------------------------------


@dataclass
class Listening:
    """A two-node job whose guests' root writes down what they hear, while they ping each other."""

    job: Job
    vni: int

    def heard(self, lab: Lab) -> dict[str, list[str]]:
        files = {node: f"/home/{self.job.user}/heard-{self.job.id}-{node}" for node in NODES}
        return {
            node: lab.run("login", "cat", path, check=False).out.splitlines() for node, path in files.items()
        }

    def has_line(self, lab: Lab, node: str, line: str) -> bool:
        return line in self.heard(lab)[node]


def listen(lab: Lab, user: str, network: str = JOB) -> Listening:
    before = vni_of(lab)
    lab.run("login", "sh", "-c", f"cat > /home/{user}/sniff.py", user=user, stdin=SNIFF)
    job = lab.submit(
        "here=$HOME/heard-$SLURM_JOB_ID go=$HOME/go-$SLURM_JOB_ID; export here go\n"
        "srun -N2 --ntasks-per-node=1 sh -c 'sudo python3 ~/sniff.py $go > $here-$(hostname)' &\n"
        "until [ -e $go ]; do for name in n1 n2; do ping -c1 -W1 $name >/dev/null; done;"
        " if [ -e $HOME/spoof.sh ]; then sh $HOME/spoof.sh; rm $HOME/spoof.sh; fi; sleep 1; done; wait",
        "-N2",
        network,
        user=user,
    )
    found = Listening(job, 0)

    def ready() -> bool:
        return all("ready" in lines for lines in found.heard(lab).values())

    until(ready, f"job {job.id} to listen", 180)
    (found.vni,) = vni_of(lab) - before
    return found


@pytest.fixture(scope="module")
def listening(lab: Lab) -> Iterator[tuple[Listening, Listening]]:
    """A job of alice and one of bob, with the same nodes and addresses; bob's with nat, if possible."""
    pair = listen(lab, "alice"), listen(lab, "bob", f"{JOB},nat" if lab.has_nat() else JOB)
    yield pair
    for one in pair:
        lab.run("ctl", "scancel", str(one.job.id))
    lab.quiet()
    assert traces(lab) == []


@pytest.fixture
def _nothing_left() -> None:
    """Jobs outlive single tests here."""


def send(lab: Lab, host: str, user: str, to: str, victim: Listening, word: str, *, frame: bytes = b"") -> str:
    """Send a frame to the victim's guest on ``to`` that claims to be from the other guest."""
    rank = NODES.index(to)
    head = mac(victim.vni, rank) + mac(victim.vni, 1 - rank) + b"\x88\xb5"
    address = f"10.77.0.{11 + rank}"
    data = vxlan(victim.vni, frame or head + MARK + word.encode() + b"." * 40)
    return lab.run(host, "python3", "-c", SEND, address, str(PORT), data, user=user).out.strip()


def dropped(lab: Lab, node: str, rule: str, vni: int) -> int:
    """Packets that such rules have dropped on a node: those of the VNI where they name one, else all."""
    rules = [line for line in lab.run(node, "nft", "list", "ruleset").out.splitlines() if rule in line]
    if "@th" in "".join(rules):
        rules = [line for line in rules if re.search(rf" ({vni:#x}|{vni}) ", line)]
    return sum(int(number) for line in rules for number in re.findall(r"counter packets (\d+)", line))


def marks(lab: Lab, victim: Listening) -> set[str]:
    return {line for lines in victim.heard(lab).values() for line in lines if line.startswith("heard")}


@pytest.mark.promise("net.foreign", "attack.vxlan", "attack.guest-address")
def test_no_foreign_frame_reaches_the_guests_of_a_job(
    lab: Lab, listening: tuple[Listening, Listening]
) -> None:
    alice, bob = listening
    assert alice.vni != bob.vni
    # from outside of the job: the login host, the controller's root, an ordinary user of the job's own nodes
    for host, user in (("login", "alice"), ("login", "bob"), ("login", "root"), ("ctl", "root")):
        for node in NODES:
            assert send(lab, host, user, node, alice, f"{host}-{user}") == "sent"
    for host, user in (("n1", "bob"), ("n2", "alice")):
        for node in NODES:
            assert send(lab, host, user, node, alice, f"{host}-{user}") == "refused"
    # from the root of another job's guest, with raw frames of every kind and the victim's addresses
    lab.run("login", "sh", "-c", "rm -f spoofed; cat > spoof.py", user="bob", stdin=SPOOF)
    words = " ".join(mac(vni, rank).hex() for vni in (alice.vni, bob.vni) for rank in (0, 1))
    packet = vxlan(
        alice.vni, mac(alice.vni, 1) + mac(alice.vni, 0) + b"\x88\xb5" + MARK + b"route" + b"." * 40
    )
    by_nat = packet.replace(b"route".hex(), b"passt".hex())
    # to the port on which the nodes' kernels listen, through passt: by its default route
    nodes = "11 12" if lab.has_nat() else ""
    script = (
        f"sudo python3 ~/spoof.py {bob.vni} {words} > ~/spoofed\n"
        f"for n in {nodes}; do sudo python3 -c '{SEND}' 10.77.0.$n {PORT} {by_nat} >> ~/spoofed; done\n"
        "sudo ip route add 10.77.0.0/24 dev vhpc0\n"
        f"for n in 11 12; do sudo ip neigh add 10.77.0.$n lladdr {mac(bob.vni, 1).hex(':')} dev vhpc0; done\n"
        f"for n in 11 12; do python3 -c '{SEND}' 10.77.0.$n {PORT} {packet} >> ~/spoofed; done\n"
        "sudo ip route del 10.77.0.0/24 dev vhpc0\n"
    )
    lab.run("login", "sh", "-c", "cat > spoof.new && mv spoof.new spoof.sh", user="bob", stdin=script)

    def spoofed() -> str:
        said = lab.run("login", "cat", "spoofed", user="bob", check=False).out
        return said if said.count("sent") == 2 + len(nodes.split()) else ""

    tried = until(spoofed, "bob's guest to try")
    assert f"spoofed as {mac(bob.vni, 0).hex(':')}" in tried
    # what kept them away: the filter of the receiving node, and that of the sending one
    assert dropped(lab, "n2", "saddr != @nodes", alice.vni) >= 4
    assert dropped(lab, "n2", "skuid", alice.vni) >= 2
    # the control: a well-formed packet of a node of the job is heard, so the listeners work, and come last
    assert send(lab, "n1", "root", "n2", alice, "control") == "sent"
    assert send(lab, "n2", "root", "n1", alice, "control") == "sent"
    until(lambda: all("heard marked-control" in lines for lines in alice.heard(lab).values()), "the control")
    assert marks(lab, alice) == {"heard marked-control"}


@pytest.mark.promise("net.separate")
def test_two_jobs_with_the_same_addresses_hear_only_themselves(
    lab: Lab, listening: tuple[Listening, Listening]
) -> None:
    for one in listening:
        own = {f"from {mac(one.vni, rank).hex(':')}" for rank in (0, 1)}
        for rank, node in enumerate(NODES):
            other = f"from {mac(one.vni, 1 - rank).hex(':')}"
            until(partial(one.has_line, lab, node, other), f"{node} to hear the pings of the other guest")
        for node, lines in one.heard(lab).items():
            sources = {line for line in lines if line.startswith("from")}
            assert sources <= own, (one.vni, node)


@pytest.mark.promise("net.flush")
@pytest.mark.usefixtures("no_health_check")
def test_the_firewall_is_restored_when_something_removes_it(
    lab: Lab, listening: tuple[Listening, Listening]
) -> None:
    lab.run("n1", "nft", "flush", "ruleset")
    for one in listening:
        assert send(lab, "login", "alice", "n1", one, "flushed") == "sent"
        assert send(lab, "n1", "bob", "n1", one, "flushed") == "refused"
    found = lab.vhpc("n1", "reconcile", "--check", check=False)
    # two segments, the port of the node, and the nat of bob's guest
    lost = 3 + lab.has_nat()
    assert [one["kind"] for one in found] == ["firewall"] * lost, found
    assert sum("its nftables table vhpc-port" in one["what"] for one in found) == 1, found
    repaired = lab.vhpc("n1", "reconcile", check=False)
    assert [one["repaired"] for one in repaired] == [True] * lost, repaired
    assert lab.vhpc("n1", "reconcile", "--check") == []
    for one in listening:
        assert send(lab, "login", "alice", "n1", one, "again") == "sent"
        assert send(lab, "n2", "root", "n1", one, "after") == "sent"
        until(partial(one.has_line, lab, "n1", "heard marked-after"), "the control")
        assert not {"heard marked-again", "heard marked-flushed"} & marks(lab, one)


def test_both_jobs_end_and_leave_nothing(lab: Lab, listening: tuple[Listening, Listening]) -> None:
    for one in listening:
        let_go(lab, one.job)
    for one in listening:
        assert one.job.wait() == "COMPLETED"
    lab.quiet()
    assert traces(lab) == []
    lab.assert_clean()


# --- faults -----------------------------------------------------------------------------------------


@pytest.mark.promise("net.killed")
@pytest.mark.parametrize("torn", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_prolog_killed_around_its_network_leaves_nothing(lab: Lab, torn: bool) -> None:
    """The Epilog clears what a Prolog left that was killed after it announced the network."""
    tried = 0
    for number in itertools.count(4):
        job = LabJob(lab, network="job")
        try:
            code = job.drive(str(number), *(["torn"] if torn else []), check=False).code
            assert code == KILLED
            journal = lab.run("n1", "sh", "-c", "cat /var/lib/vhpc/journal/*", check=False).out
            tried += '"kind":"network"' in journal
            assert not traces(lab) or tried, "a network without an entry in the journal"
            job.hook("epilog")
            assert traces(lab) == []
            job.clean()
        finally:
            job.drive("end")
        if tried == 3:
            return


@pytest.mark.promise("net.killed")
@pytest.mark.usefixtures("no_health_check")
def test_an_epilog_killed_at_its_network_leaves_nothing(lab: Lab) -> None:
    """The next Epilog continues where the killed one was."""
    job = LabJob(lab, network="job", known=True)
    try:
        job.hook("prolog")
        assert len([line for line in traces(lab) if line.startswith("n1")]) == 7
        job.interrupt_epilog("domain")
        assert traces(lab), "the network outlives the guest"
        job.interrupt_epilog("network")
        assert traces(lab) == []
        job.hook("epilog")
        job.clean()
    finally:
        job.end()
