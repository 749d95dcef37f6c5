# SPDX-License-Identifier: Apache-2.0
"""Attacks on vhpcd over the network, while jobs of others start and end: floods, lies of a node, replays.

The time of vhpcd in a start is taken from PrologSlurmctld and the nodes' timelines:
a guest's boot time says more about the machine than about vhpcd.
"""

from __future__ import annotations

import re
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path

import pytest
from cluster import NODES, VLAB, Job, Lab
from injection import WAITING, let_go, runs, until

pytestmark = pytest.mark.lab

FLOOD = (Path(__file__).parent / "flood.py").read_text()
PORT, SECONDS = "7633", "800"
STARTS, ROUNDS = 3, 3
ALLOWED_S = 1.0
LOG_LINES = 200
"""Most that vhpcd may log in a flood of a minute or two; before there was a limit it was 180,000 in 30 s."""
RELEASE_S = 30
"""Nodes acknowledge the end of a job so soon, whoever floods vhpcd."""


@contextmanager
def running(lab: Lab, host: str, user: str, script: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A Python script on a host, which ends with the block."""
    words = [VLAB, "exec", "-u", user, host, "--", "/usr/bin/python3", "-c", script, *arguments]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            yield process
        finally:
            process.terminate()
            process.wait(30)


@contextmanager
def flood(lab: Lab, kind: str) -> Iterator[None]:
    """Alice floods vhpcd, from the login host and from a job of hers on n1."""
    words = (kind, "ctl", PORT, SECONDS)
    script = f"exec python3 - {' '.join(words)} <<'EOF'\n{FLOOD}\nEOF"
    with running(lab, "login", "alice", FLOOD, *words):
        job = lab.submit(script, "-N1", "-n1", "-w", "n1", "--mem=200", image=None)
        try:
            assert job.wait("RUNNING") == "RUNNING"
            time.sleep(1.0)
            yield
        finally:
            lab.run("login", "scancel", str(job.id), user="alice")
            job.wait()


@pytest.fixture(scope="module")
def _starts_noted(lab: Lab) -> Iterator[None]:
    """PrologSlurmctld notes when it starts: newer releases of Slurm do not log each start of a job."""
    hook = "/usr/libexec/vhpc/prolog-slurmctld"
    wrapper = f'#!/bin/sh\ndate +%FT%T.%6N >"/tmp/prolog-$SLURM_JOB_ID"\nexec {hook}.kept\n'
    lab.run("ctl", "mv", hook, f"{hook}.kept")
    try:
        lab.run("ctl", "sh", "-c", 'printf %s "$2" >"$1" && chmod 755 "$1"', "sh", hook, wrapper)
        yield
    finally:
        lab.run("ctl", "mv", f"{hook}.kept", hook)


def prolog_slurmctld_s(lab: Lab, job: Job) -> float:
    """How long slurmctld waited for its Prolog, and with it for vhpcd."""
    log = lab.run("ctl", "grep", "-E", rf"JobId={job.id}( |$)", "/var/log/slurm/slurmctld.log").out
    ended = re.search(r"^\[(\S+)\] prolog_running_decr: Configuration for JobId=", log, re.M)
    assert ended is not None, log
    began = lab.run("ctl", "cat", f"/tmp/prolog-{job.id}").out.strip()
    return (datetime.fromisoformat(ended[1]) - datetime.fromisoformat(began)).total_seconds()


def cost_of_vhpcd_s(lab: Lab, job: Job) -> float:
    """vhpcd's part of a job's start: of PrologSlurmctld, and on the node that waited longest."""
    nodes = lab.vhpc("ctl", "timeline", str(job.id))["nodes"]
    leases: list[float] = [
        stage["took_s"] for one in nodes for stage in one["stages"] if stage["name"] == "lease"
    ]
    assert len(leases) == len(NODES)
    return prolog_slurmctld_s(lab, job) + max(leases)


def start_one(lab: Lab) -> float:
    """A job of bob's on both nodes, from its start to the release of its lease."""
    job = lab.submit("true", "-N2", "-n2", "--mem=1500", user="bob")
    assert job.wait(timeout=400) == "COMPLETED", job.told()
    show = job.show()
    assert show["Restarts"] == "0"
    (comment,) = job.accounted("AdminComment")
    assert re.fullmatch(r"vhpc: image \S+@sha256:[0-9a-f]{64}", comment)
    until(lambda: not [line for line in lab.leases() if line.startswith(f"{job.id}.")], "release", RELEASE_S)
    return cost_of_vhpcd_s(lab, job)


def logged(lab: Lab) -> int:
    return int(lab.run("ctl", "sh", "-c", "wc -l </var/log/vlab/vhpcd.log").out)


@pytest.mark.promise("vhpcd.flood", "attack.flood", "attack.log-fill")
@pytest.mark.usefixtures("_starts_noted")
@pytest.mark.parametrize(
    "kind",
    ["payload", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("silent", "storm", "stranger"))],
)
def test_a_flood_of_a_user_delays_no_start_of_another(lab: Lab, kind: str) -> None:
    calm = [start_one(lab) for _ in range(STARTS)]
    before = logged(lab)
    usual = statistics.median(calm)
    rounds: list[list[float]] = []
    with flood(lab, kind):
        # A busy machine delays some rounds; a vhpcd without shares took 8 and 18 s in each.
        while len(rounds) < ROUNDS and (not rounds or statistics.median(rounds[-1]) - usual >= ALLOWED_S):
            rounds.append([start_one(lab) for _ in range(STARTS)])
        lines = logged(lab) - before
    print(f"{kind}: without {calm}, with {rounds} s; {lines} lines logged")
    assert statistics.median(rounds[-1]) - usual < ALLOWED_S
    assert lines < LOG_LINES * len(rounds)
    assert not [node for node in NODES if "DRAIN" in lab.node_state(node)[0]]


# --- a compromised node -----------------------------------------------------------------------------------

LIE = """
import sys
sys.path.insert(0, "/opt/vhpc/lib/python3/site-packages")
from dataclasses import dataclass
from vhpc_slurm.config import load
from vhpc_slurm.controller.client import ControllerClient
from vhpc_slurm.errors import VhpcError
from vhpc_slurm.model import Generation

@dataclass
class Ack:
    generation: object
    node: str
    clean: bool = True
    note: str = ""
    timeline: object = None

client = ControllerClient(load())
job, generation, node = int(sys.argv[1]), Generation.parse(sys.argv[2]), sys.argv[3]
for lie in (
    lambda: client.acknowledge(Ack(generation, node)),
    lambda: client.lease(job, None, node, 1.0),
    lambda: client.ending(job, None),
    lambda: client.fence(node),
    lambda: client.tell_fabric(force=True, wait_s=0.0),
):
    try:
        lie()
        print("believed")
    except VhpcError as err:
        print(err.what)
print(client.status().speaks_for)
"""


def held_by(lab: Lab, job: Job) -> tuple[str, list[str]]:
    """The state of a job's lease, and which nodes vhpcd waits for, read from its database."""
    script = (
        "import sqlite3, sys\n"
        "db = sqlite3.connect('file:/var/lib/vhpc/vhpcd/leases.sqlite?mode=ro', uri=True)\n"
        f"row = db.execute('SELECT id, state FROM lease WHERE job_id = {job.id}').fetchone()\n"
        "nodes = db.execute('SELECT node FROM node WHERE lease = ? AND taken IS NOT NULL"
        " AND acknowledged IS NULL ORDER BY node', (row[0],)).fetchall()\n"
        "print(row[1], *(node for node, in nodes))\n"
    )
    state, *nodes = lab.run("ctl", "python3", "-", stdin=script).out.split()
    return state, nodes


@pytest.mark.promise("attack.other-node", "attack.controller-request")
def test_root_of_a_node_cannot_speak_for_others(lab: Lab) -> None:
    job = lab.submit(WAITING, "-N1", "-w", "n2", user="bob")
    runs(lab, job)
    (generation,) = {line.split()[0] for line in lab.leases() if line.startswith(f"{job.id}.")}
    assert held_by(lab, job) == ("ready", ["n2"])
    said = lab.run("n1", "/opt/vhpc/bin/python", "-", str(job.id), generation, "n2", stdin=LIE).out
    assert said.splitlines() == [
        "10.77.0.11 may not send requests of node n2",
        "10.77.0.11 may not send requests of node n2",
        "10.77.0.11 may not send requests of the controller",
        "10.77.0.11 may not send requests of the controller",
        "10.77.0.11 may not send requests of the controller",
        "('n1',)",
    ]
    assert held_by(lab, job) == ("ready", ["n2"])
    assert job.show()["JobState"] == "RUNNING"
    let_go(lab, job)
    assert job.wait() == "COMPLETED"
    assert "done" in job.output()


# --- a captured credential ----------------------------------------------------------------------------------

CAPTURE = """
import os, socket, struct, sys
# without a protocol it hears nothing until it is bound: with one it would hear lo
link = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
link.bind(("eth0", 0x0800))
link.settimeout(0.2)
flows = {}
print("ready", flush=True)
while not os.path.exists(sys.argv[1]):
    try:
        packet = link.recv(65536)
    except TimeoutError:
        continue
    ip = packet[14:]
    if ip[9] != 6:
        continue
    tcp = ip[(ip[0] & 15) * 4 : struct.unpack(">H", ip[2:4])[0]]
    source, target, sequence = struct.unpack_from(">HHI", tcp)
    data = tcp[(tcp[12] >> 4) * 4 :]
    if target == 7633 and tcp[13] & 2:  # SYN: not from the middle of a request
        flows[ip[12:16], source] = {}
    if target == 7633 and data and (ip[12:16], source) in flows:
        flows[ip[12:16], source][sequence] = data
for flow in flows.values():
    request = b"".join(data for _, data in sorted(flow.items()))
    if len(request) > 4 and len(request) >= 4 + int.from_bytes(request[:4], "big"):
        print(request.hex(), flush=True)
"""
REPLAY = """
import socket, sys
for line in sys.stdin:
    with socket.create_connection(("ctl", 7633), timeout=20) as link:
        try:
            link.sendall(bytes.fromhex(line))
            print(len(link.recv(100)))
        except ConnectionError:
            print(0)
"""


def captured(lab: Lab, job: Job) -> list[str]:
    """What an attacker on the network sees of a job's end: each request whole, in hexadecimal."""
    over = f"/tmp/captured-{job.id}"
    with running(lab, "ctl", "root", CAPTURE, over) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        found: list[str] = []
        reader = threading.Thread(target=lambda: found.extend(process.stdout or ()))
        reader.start()
        let_go(lab, job)
        assert job.wait() == "COMPLETED"
        # the last request, and its effect: the controller knows of the end, and that the node has released it
        until(lambda: not [line for line in lab.leases() if line.startswith(f"{job.id}.")], "release")
        lab.run("ctl", "touch", over)
        reader.join(60)
    return [line.strip() for line in found]


def replayed(lab: Lab, host: str, requests: list[str], user: str = "alice") -> list[str]:
    """The answer's size for each request: 0 bytes for no answer."""
    return lab.run(
        host, "/usr/bin/python3", "-c", REPLAY, user=user, stdin="\n".join(requests) + "\n"
    ).out.split()


@pytest.mark.promise("attack.replay")
def test_captured_requests_are_of_no_use(lab: Lab) -> None:
    job = lab.submit(WAITING, "-N1", "-w", "n2", user="bob")
    runs(lab, job)
    with ExitStack() as stack:
        requests = captured(lab, job)
        frames = [bytes.fromhex(one) for one in requests]
        assert frames, "the end of a job is told to vhpcd over the network"
        assert all(frame[4:10] == b"MUNGE:" for frame in frames)
        before = lab.leases()
        for host in ("login", "n1", "n2"):
            assert set(replayed(lab, host, requests)) == {"0"}, "munged of ctl has seen them all"
        lines = logged(lab)
        # A munged that was started again has forgotten; vhpcd has not.
        lab.service("ctl", "restart", "munged")
        stack.callback(lab.service, "ctl", "restart", "munged")
        assert "0" not in replayed(lab, "n2", requests), "vhpcd answers, to its clients only"
        log = lab.run("ctl", "tail", "-n", f"+{lines + 1}", "/var/log/vlab/vhpcd.log").out
        assert "replayed request of uid 0 from 10.77.0.12" in log
        assert lab.leases() == before
