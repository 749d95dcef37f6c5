# SPDX-License-Identifier: Apache-2.0
"""Attacks on clusters: by former members, by other users, and by root of a member's guest."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from cluster import Done, Job, Lab, publish
from cluster_jobs import attempt, awaited, booted, calls, cancelled, end, inside, member, members
from frames import RAW, SEND, SNIFF, mac, vxlan
from injection import WAITING, one_line, runs, said, settled, until

from vhpc_slurm.node.guest.cluster import ClusterGuest, tell
from vhpc_slurm.node.guest.wire import HEADER, FrameType, Op, Tag, put

pytestmark = [pytest.mark.lab, pytest.mark.timeout(900)]

TEAM, CLOSED = "team", "closed"
HPC = "debian-hpc"
RULE = f"""
[[policy]]
name = "projects"
accounts = ["{TEAM}", "{CLOSED}"]
account_clusters = "create"
"""
TOML = "/etc/vhpc/vhpc.toml"
PORT, UNDERLAY = "7634", {"n1": "10.77.0.11", "n2": "10.77.0.12"}
# Runs as root of a guest: gets the agent's own descriptor of the channel to the node, and writes to it.
FORGE = """
import ctypes, glob, os, sys
libc = ctypes.CDLL(None, use_errno=True)
for path in glob.glob("/proc/[0-9]*/fd/*"):
    try:
        link = os.readlink(path)
    except OSError:
        continue  # it has been closed
    if "/vport" in link:
        _, _, pid, _, fd = path.split("/")
        mine = libc.syscall(438, os.pidfd_open(int(pid)), int(fd), 0)  # pidfd_getfd
        try:
            print(link, "wrote", os.write(mine, bytes.fromhex(sys.argv[1])), flush=True)
        except OSError as err:
            print(link, mine, os.strerror(ctypes.get_errno()), err, flush=True)
"""
# Runs as root of a node: the same request, as the node itself sends it.
ASK = """
import sys
from vhpc_slurm.node.guest.channel import GuestChannel
from vhpc_slurm.node.guest.wire import Op
with GuestChannel.connect(sys.argv[1]) as channel:
    channel.ask(Op.CLUSTER, bytes.fromhex(sys.argv[2]), 20.0)
"""


@pytest.fixture(scope="module")
def hpc_image() -> None:
    """An image with ssh."""
    publish(HPC)


@pytest.fixture(scope="module")
def projects(lab: Lab) -> Iterator[None]:
    """Accounts: alice and bob are in one, alice alone in the other; a rule permits their clusters."""

    def sacctmgr(act: str, *words: str) -> None:
        lab.run("ctl", "sacctmgr", "-i", act, *words, check=False)

    for account, users in ((TEAM, "alice,bob"), (CLOSED, "alice")):
        sacctmgr("add", "account", account)
        sacctmgr("add", "user", users, f"account={account}")
    try:
        lab.run("ctl", "cp", "-p", TOML, f"{TOML}.before")
        lab.run("ctl", "sh", "-ec", f"cat >>{TOML}", stdin=RULE)
        lab.service("ctl", "restart", "vhpcd")
        yield
    finally:
        lab.cancel_all()
        lab.run("ctl", "mv", "-f", f"{TOML}.before", TOML)
        for account in (TEAM, CLOSED):
            sacctmgr("delete", "user", "alice,bob", f"account={account}")
            sacctmgr("delete", "account", account)
        lab.service("ctl", "restart", "vhpcd")


def vni(lab: Lab, node: str, job: Job) -> int:
    found = json.loads(lab.run(node, "cat", f"/run/vhpc/jobs/{job.id}/cluster.json").out)
    return int(found["own"]["segment"]["vni"])


def ssh(lab: Lab, job: Job, to: str, *options: str) -> Done:
    """`id -un` on another guest, by ssh from a guest of the job."""
    return attempt(lab, job, "timeout", "60", "ssh", "-n", *options, to, "id", "-un")


def with_key(path: str) -> tuple[str, ...]:
    """Options of ssh for nothing but a key."""
    ask = ("StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "IdentitiesOnly=yes", "BatchMode=yes")
    return ("-F", "none", "-i", path, *(word for one in ask for word in ("-o", one)))


@pytest.mark.promise("cluster.account", "attack.member-login", "attack.former-member")
@pytest.mark.usefixtures("projects", "hpc_image")
def test_users_of_an_account_share_a_network_and_no_keys(lab: Lab) -> None:
    name, options = f"{TEAM}/alpha", ("-A", TEAM, "--mem=900")
    keep = "cp /run/vhpc/ssh/id_ed25519 ~/key-$SLURM_JOB_ID\n"
    with cancelled(lab):
        hers = booted(lab, "n1", *options, name=name, image=HPC)
        his = booted(lab, "n2", *options, name=name, image=HPC, user="bob", first=keep)
        also = booted(lab, "n2", *options, name=name, image=HPC, first=keep)
        awaited(lab, hers, his, also)
        every = {hers.id: f"n1-j{hers.id}", his.id: f"n2-j{his.id}", also.id: f"n2-j{also.id}"}
        until(lambda: members(lab, hers).keys() == every.keys(), "all to know each other", 60)
        for job in (hers, his, also):
            assert {number: row["host"] for number, row in members(lab, job).items()} == every
            for number, host in every.items():
                assert calls(lab, job, host) == str(number)
        assert inside(lab, his, "printenv", "VHPC_CLUSTER_NAME") == f"{name}\n"
        # in the order in which they have joined, which need not be that of their submission: one for all
        orders = []
        for job in (hers, his, also):
            hostfile = inside(lab, job, "cat", "/run/vhpc/cluster/hostfile").split()
            orders.append([word for word in hostfile if "slots" not in word])
            assert orders[-1] == [row["host"] for row in members(lab, job).values()]
        assert sorted(orders[0]) == sorted(every.values())
        assert orders[1:] == [orders[0]] * 2

        # logins: to guests of the same user only, by whatever name
        assert ssh(lab, hers, every[also.id]).out == "alice\n"
        assert ssh(lab, also, every[hers.id]).out == "alice\n"
        for job, host in ((hers, every[his.id]), (his, every[hers.id]), (his, every[also.id])):
            for user in ("alice", "bob", "root"):
                done = ssh(lab, job, host, "-l", user)
                assert (done.code, done.out) == (255, ""), (job.user, host, user, done)
                assert "Permission denied" in done.err
        keys = inside(lab, his, "sudo", "sh", "-c", "cat /run/vhpc/ssh/*keys*; ls /run/vhpc/ssh")
        assert keys.count("ssh-ed25519") == 2, "his own key, for the job and for the cluster"
        assert "-2001" not in keys

        # what both see
        show = ("vhpc", "cluster", "show", name, "--json")
        until(lambda: lab.run("login", *show, user="bob", check=False).code == 0, "vhpcd to know bob", 60)
        shown = json.loads(lab.run("login", *show, user="bob").out)
        assert {one["job"]: one["user"] for one in shown["members"]} == {
            hers.id: "alice",
            his.id: "bob",
            also.id: "alice",
        }

        # the key of a former member: known while it is there, and then nowhere
        address = str(members(lab, hers)[hers.id]["ipv4"])
        stolen = with_key(f"/home/alice/key-{also.id}")
        assert ssh(lab, hers, address, *stolen).out == "alice\n"
        lab.run("login", "scancel", str(also.id), user="alice")
        until(lambda: members(lab, hers).keys() == {hers.id, his.id}, "the member to be gone", 60)
        done = ssh(lab, hers, address, *stolen)
        assert (done.code, "Permission denied" in done.err) == (255, True), done
        assert ssh(lab, hers, every[hers.id]).out == "alice\n"
        assert calls(lab, his, every[hers.id]) == str(hers.id)
        end(lab, hers, his)
    settled(lab)


@pytest.mark.promise("attack.cluster-join")
@pytest.mark.usefixtures("projects")
def test_a_job_without_permission_joins_no_cluster(lab: Lab) -> None:
    with cancelled(lab):
        hers = member(lab, "n1", "-A", CLOSED, name=f"{CLOSED}/alpha")
        # Slurm 24.11 gives a job his default account if he has no association with the one that he names
        for account, name, line in (
            (
                CLOSED,
                f"{CLOSED}/alpha",
                f"only jobs of account {CLOSED} .* is one of account users .submit it",
            ),
            (
                TEAM,
                f"{CLOSED}/alpha",
                f"only jobs of account {CLOSED} .* is one of account {TEAM} .submit it",
            ),
            ("users", "users/alpha", "no policy rule permits cluster users/alpha "),
        ):
            job = booted(lab, "n2", "-A", account, name=name, user="bob")
            assert job.wait() == "FAILED"
            one_line(job, line)
        # and a job cannot join by a change of its account while it waits
        job = booted(lab, "n2", "-A", TEAM, "--hold", name=f"{CLOSED}/alpha", user="bob")
        for host, user in (("login", "bob"), ("ctl", "root")):
            words = ("scontrol", "update", f"JobId={job.id}", f"Account={CLOSED}")
            lab.run(host, *words, user=user, check=False)
        lab.run("login", "scontrol", "release", str(job.id), user="bob")
        assert job.wait() == "FAILED"
        one_line(job, f"is one of account [a-z]+ .submit it|no association of bob with account {CLOSED} ")
        for name in ("../alpha", f"{CLOSED}/", f"{CLOSED}/a/b", "Team/alpha"):
            words = ("sbatch", "--wrap=true", "--vhpc-image=debian-minimal", f"--vhpc-cluster={name}")
            done = lab.run("login", *words, user="bob", check=False)
            assert (done.code != 0, "[ACCOUNT/]NAME[:keep] is expected" in done.err) == (True, True), done
        for act in ("show", "create", "rm"):
            assert (
                lab.run("login", "vhpc", "cluster", act, f"{CLOSED}/alpha", user="bob", check=False).code == 1
            )
        assert members(lab, hers).keys() == {hers.id}
        # the control: a job with the permission does join
        also = member(lab, "n2", "-A", CLOSED, name=f"{CLOSED}/alpha")
        assert members(lab, hers).keys() == {hers.id, also.id}
        end(lab, hers, also)


@pytest.mark.promise("attack.former-member", "cluster.apart")
def test_frames_of_former_members_and_of_others_arrive_nowhere(lab: Lab) -> None:
    for user, text in (("alice", SNIFF), ("alice", RAW), ("bob", RAW)):
        path = f"/home/{user}/{'sniff' if text is SNIFF else 'raw'}.py"
        lab.run("login", "sh", "-c", f"cat > {path}", user=user, stdin=text)
    listen = "sudo python3 ~/sniff.py ~/go-$SLURM_JOB_ID > ~/heard-$SLURM_JOB_ID &\n"

    def root_sends(job: Job, mark: str, *sources: bytes) -> None:
        words = ("sudo", "python3", f"/home/{job.user}/raw.py", f"marked-{mark}", target.hex())
        inside(lab, job, *words, *(source.hex() for source in sources))

    def node_sends(mark: str, number: int, *, user: str = "root") -> str:
        frame = target + lost + b"\x88\xb5" + f"marked-{mark}".encode() + b"." * 40
        words = ("python3", "-c", SEND, UNDERLAY["n1"], PORT, vxlan(number, frame))
        return lab.run("n2", *words, user=user).out.strip()

    def heard() -> set[str]:
        lines = lab.run("login", "cat", f"/home/alice/heard-{stays.id}", check=False).out.splitlines()
        return {line.removeprefix("heard marked-") for line in lines if line.startswith("heard")}

    with cancelled(lab):
        stays, near = booted(lab, "n1", first=listen), booted(lab, "n1")
        leaves, his = booted(lab, "n2"), booted(lab, "n2", user="bob")
        awaited(lab, stays, near, leaves, his)
        ours, theirs = vni(lab, "n1", stays), vni(lab, "n2", leaves)
        target, lost = mac(ours, 0), mac(theirs, 0)
        until(lambda: members(lab, stays).keys() == {stays.id, near.id, leaves.id}, "three members", 60)

        # the control: live members are heard, and packets of their nodes
        root_sends(leaves, "live")
        assert node_sends("live-node", ours) == "sent"
        assert node_sends("user", ours, user="alice") == "refused"
        until(lambda: {"live", "live-node"} <= heard(), "frames of live members", 60)

        lab.run("login", "scancel", str(leaves.id), user="alice")
        until(lambda: members(lab, stays).keys() == {stays.id, near.id}, "the member to be gone", 60)
        other = lab.submit(WAITING, "-n1", "--mem=500", "-w", "n2", "--vhpc-network=job")
        assert node_sends("late-node", ours) == "sent"
        assert node_sends("late-vni", theirs) == "sent"
        root_sends(his, "of-bob", lost, target)
        runs(lab, other)
        root_sends(other, "late", lost, target)

        # the control: the listener hears what comes last
        root_sends(near, "last")
        until(lambda: "last" in heard(), "the last frame", 60)
        assert heard() == {"live", "live-node", "last"}
        lab.run("login", "scancel", str(other.id), user="alice")
        end(lab, stays, near, his)
    settled(lab)


class Recorded:
    """A channel that only takes a request."""

    body = b""

    def ask(self, _op: Op, body: bytes, _timeout_s: float) -> None:
        self.body = body


def forged(name: str, job: Job, host: str, ipv4: str) -> bytes:
    """A request that has a guest know one other guest, which is not what it says."""
    recorded: Any = Recorded()
    guest = ClusterGuest(host, job.id, ipv4, "fd76:6870:6300::9", 2)
    tell(recorded, name, job.id, [guest], ("ssh-ed25519 AAAAforged",), ("ssh-ed25519 AAAAforged",), 2001, 5.0)
    body: bytes = recorded.body
    return body


@pytest.mark.promise("attack.member-forgery")
def test_root_of_a_guest_changes_no_other_member(lab: Lab) -> None:
    with cancelled(lab):
        far, near, evil = booted(lab, "n1"), booted(lab, "n2"), booted(lab, "n2")
        awaited(lab, far, near, evil)
        every = {far.id, near.id, evil.id}
        until(lambda: members(lab, far).keys() == members(lab, near).keys() == every, "three members", 60)
        before = {job.id: members(lab, job) for job in (far, near)}
        host, ipv4 = f"n1-j{far.id}", str(before[far.id][evil.id]["ipv4"])
        body = forged("alpha", far, host, ipv4)

        # the control: a guest takes this request from its node
        socket = f"/run/vhpc/jobs/{evil.id}/g0/root.sock"
        lab.run("n2", "/opt/vhpc/bin/python", "-c", ASK, socket, body.hex())
        assert {row["ipv4"] for row in members(lab, evil).values()} == {ipv4}

        # its root writes the files of its own guest, and sends the request to the node
        root = f"echo {ipv4} {host} >> /etc/hosts; rm -f /run/vhpc/cluster/*; id -u"
        assert inside(lab, evil, "sudo", "sh", "-c", root) == "0\n"
        lab.run("login", "sh", "-c", "cat > forge.py", user="alice", stdin=FORGE)
        fields = put(Tag.OP, Op.CLUSTER) + put(Tag.REQUEST_ID, 1) + body
        frames = b"".join(
            HEADER.pack(len(fields), kind, 0, 0, 0, 0) + fields
            for kind in (FrameType.REQUEST, FrameType.REPLY)
        )
        words = f"sudo python3 ~/forge.py {frames.hex()}"
        lab.run("login", "sh", "-c", f"echo '{words}' > forge.sh", user="alice")
        attempt(lab, evil, "sh", "/home/alice/forge.sh")
        # that these bytes came: they are against the protocol, which ends this guest alone
        assert evil.wait(timeout=60) == "FAILED"
        assert "the guest violated the channel's protocol" in said(lab, evil)

        for job in (far, near):
            known = members(lab, job)
            assert known.keys() >= {far.id, near.id}
            assert known.items() <= before[job.id].items(), "at most the attacker is gone"
            hosts = inside(lab, job, "cat", "/etc/hosts")
            assert f"{before[job.id][far.id]['ipv4']} {host}\n" in hosts
            assert f"{ipv4} {host}\n" not in hosts
        assert calls(lab, near, host) == str(far.id)
        assert calls(lab, far, f"n2-j{near.id}") == str(near.id)
        joins = member(lab, "n1")
        assert members(lab, near).keys() >= {far.id, near.id, joins.id}
        end(lab, far, near, joins)
        assert "Traceback" not in said(lab, near)
    settled(lab)
