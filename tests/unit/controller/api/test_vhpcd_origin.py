# SPDX-License-Identifier: Apache-2.0
"""vhpcd as a process: floods of those whom it does not know, and requests from where they may not come.

All of it on the loopback interface: 127.0.0.3 is node n1, 127.0.0.5 the host of
slurmctld, 127.0.0.2 a login node; vhpcd's own host is 127.0.0.1.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from controller_lab import (
    HAVE_MUNGED,
    NOBODY,
    Munged,
    allocation,
    as_uid,
    bind_from,
    munged,
    request,
    stop,
    wait_for,
)
from vhpcd_process import Vhpcd, frame_of, make

from pace import limit
from vhpc_slurm.cli.host.checks import services
from vhpc_slurm.controller.api import protocol as wire
from vhpc_slurm.controller.api.status_messages import Status
from vhpc_slurm.model import Generation
from vhpc_slurm.munge import Munge

pytestmark = [
    pytest.mark.promise("attack.ssh-keys"),
    pytest.mark.long,
    pytest.mark.skipif(not HAVE_MUNGED, reason="needs munged: apt install munge"),
    pytest.mark.skipif(os.geteuid() != 0, reason="uses privileged ports and other users: run as root"),
]

NODE, LOGIN, CONTROLLER = "127.0.0.3", "127.0.0.2", "127.0.0.5"
FLOOD = Path(__file__).parents[3] / "lab" / "flood.py"
PATIENCE_S = 4.0
"""Seconds for a request that a flood must not delay: without a flood milliseconds, without shares 8 s.

A machine that stops for seconds delays the one request of many that is under way.
"""


def undelayed(requests: list[float]) -> bool:
    """Whether a flood has not delayed requests, which took so long."""
    return len([took for took in requests if took > PATIENCE_S]) <= len(requests) // 10


@pytest.fixture
def vhpcd(tmp_path: Path, daemon: Munged) -> Iterator[Vhpcd]:
    found = make(tmp_path, daemon)
    (tmp_path / "sinfo.out").write_text(f"n1|{NODE}|{NODE}\nn2|n2.invalid|127.0.0.4\n")
    (tmp_path / "scontrol.out").write_text(f"SlurmctldHost[0]        = {CONTROLLER}\n")
    found.start()
    wait_for(lambda: "addresses of hosts" in found.log, "Slurm was not asked")
    yield found
    stop(found.process) if found.process is not None else None


def from_port(vhpcd: Vhpcd, source: str, port: int = 0) -> socket.socket:
    link = socket.socket()
    link.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bind_from(link, source, port)
    link.settimeout(15)
    link.connect(("127.0.0.1", vhpcd.config.controller.port))
    return link


def sent(vhpcd: Vhpcd, frame: bytes, source: str, port: int = 0) -> wire.Answer | None:
    """The answer to bytes; None where the connection is closed without one."""
    with from_port(vhpcd, source, port) as link:
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            link.sendall(frame)
            while chunk := link.recv(65536):
                answer += chunk
    if not answer:
        return None
    payload = vhpcd.munge().decode(answer[4:]).payload
    return wire.read_answer(wire.unwrap(payload, "answer"))


def sealed(vhpcd: Vhpcd, body: wire.Request) -> bytes:
    return frame_of(vhpcd.munge().encode(wire.wrap("request", os.urandom(16).hex(), body)))


def asked(vhpcd: Vhpcd, body: wire.Request, source: str, port: int = 0) -> wire.Answer | None:
    return sent(vhpcd, sealed(vhpcd, body), source, port)


def refusal(answer: wire.Answer | None) -> str:
    assert isinstance(answer, wire.Failure), answer
    assert answer.kind == "fabric"
    return answer.what


# --- from where a request comes ------------------------------------------------------------------------


@pytest.mark.promise("attack.other-node")
def test_root_of_a_node_acts_for_that_node_only(vhpcd: Vhpcd) -> None:
    lease = vhpcd.client.open_generation(request(1), allocation("n1", "n2"))
    for node in ("n1", "n2"):
        vhpcd.client.lease(1, 0, node, 1.0)
    vhpcd.client.ending(1, 0)

    def clean(node: str) -> wire.Request:
        return wire.Acknowledge(generation=str(lease.generation), node=node, clean=True)

    for source in (NODE, LOGIN, CONTROLLER):
        for port in (0, 901):
            assert (
                refusal(asked(vhpcd, clean("n2"), source, port))
                == f"{source} may not send requests of node n2"
            )
    assert refusal(asked(vhpcd, clean("n1"), LOGIN)) == f"{LOGIN} may not send requests of node n1"
    take = wire.GetLease(job_id=1, restart=None, node="n2", wait_s=1.0)
    assert refusal(asked(vhpcd, take, NODE)) == f"{NODE} may not send requests of node n2"
    assert isinstance(asked(vhpcd, clean("n1"), NODE), wire.Done)
    (record,) = vhpcd.client.leases()
    assert (record.acknowledged, str(record.lease.state)) == (("n1",), "ending")
    assert f"uid 0 at {NODE} is refused: {NODE} may not send requests of node n2" in vhpcd.log


@pytest.mark.promise("attack.controller-request")
def test_root_of_a_node_cannot_act_as_the_controller(vhpcd: Vhpcd) -> None:
    lease = vhpcd.client.open_generation(request(1), allocation("n1", "n2"))
    for body in (
        wire.Ending(job_id=1, restart=None),
        wire.Fence(node="n2"),
        wire.ClearKey(generations=(str(lease.generation),)),
        wire.TellFabric(force=True),
    ):
        for source in (NODE, LOGIN):
            assert refusal(asked(vhpcd, body, source)) == f"{source} may not send requests of the controller"
    (record,) = vhpcd.client.leases()
    assert str(record.lease.state) == "ready"
    assert isinstance(asked(vhpcd, wire.Ending(job_id=1, restart=None), CONTROLLER), wire.Done)
    (record,) = vhpcd.client.leases()
    assert str(record.lease.state) == "released"


def test_root_of_any_host_may_read(vhpcd: Vhpcd) -> None:
    vhpcd.client.open_generation(request(1), allocation("n1"))
    look = wire.GetLease(job_id=1, restart=None, node="n1", wait_s=0.0)
    assert isinstance(asked(vhpcd, look, LOGIN), wire.LeaseAnswer)
    assert isinstance(asked(vhpcd, wire.ListLeases(), LOGIN), wire.LeasePage)
    assert isinstance(asked(vhpcd, wire.AskStatus(), LOGIN), Status)


def test_each_host_learns_the_names_it_may_act_for(vhpcd: Vhpcd) -> None:
    def told(source: str) -> tuple[str, tuple[str, ...]]:
        answer = asked(vhpcd, wire.AskStatus(), source)
        assert isinstance(answer, Status)
        return answer.seen_at, answer.speaks_for

    assert told(NODE) == (NODE, ("n1",))
    assert told("127.0.0.4") == ("127.0.0.4", ("n2",))
    assert told(CONTROLLER) == (CONTROLLER, (wire.CONTROLLER,))
    assert told(LOGIN) == (LOGIN, ())
    assert told("127.0.0.1") == ("127.0.0.1", (wire.ANY,))


@pytest.mark.parametrize(
    ("speaks_for", "node", "controller", "says"),
    [
        (("n1",), "n1", False, ["ok: vhpcd knows 10.0.0.1 as an address of node n1"]),
        (
            ("n2",),
            "n1",
            False,
            ["error: vhpcd sees this host at 10.0.0.1, which is not an address of node n1"],
        ),
        (
            ("n1",),
            "n1",
            True,
            ["ok: vhpcd knows", "error: vhpcd sees this host at 10.0.0.1, which is not an address of"],
        ),
        ((wire.CONTROLLER,), "", True, []),
        ((), "", False, []),
        ((wire.ANY,), "n1", True, []),
    ],
)
def test_doctor_reports_a_host_that_vhpcd_does_not_trust(
    speaks_for: tuple[str, ...], node: str, controller: bool, says: list[str]
) -> None:
    status = Status(
        version="1",
        protocol=wire.VERSION,
        time=0.0,
        uptime_s=0.0,
        database="/db",
        leases={},
        connections=1,
        seen_at="10.0.0.1",
        speaks_for=speaks_for,
    )
    found = [
        f"{one.level.value}: {one.what}" for one in services._believed(status, node, controller=controller)
    ]
    assert len(found) == len(says)
    assert all(line.startswith(start) for line, start in zip(found, says, strict=True)), found


@pytest.mark.promise("attack.no-slurm")
def test_without_slurm_only_the_own_host_changes_anything(tmp_path: Path, daemon: Munged) -> None:
    vhpcd = make(tmp_path, daemon)
    for name in ("sinfo", "scontrol"):
        (tmp_path / "bin" / name).unlink()
    vhpcd.start()
    try:
        lease = vhpcd.client.open_generation(request(1), allocation("n1"))
        answer = asked(vhpcd, wire.Acknowledge(generation=str(lease.generation), node="n1", clean=True), NODE)
        assert isinstance(answer, wire.Failure)
        assert (
            answer.what == "vhpcd does not know the addresses of Slurm's hosts, so it cannot check the sender"
        )
        assert answer.why.startswith("sinfo ")
        assert "No such file or directory" in answer.why
        vhpcd.client.ending(1, 0)
        wait_for(lambda: "do not give the addresses of Slurm's hosts: sinfo" in vhpcd.log, "no line")
    finally:
        assert vhpcd.process is not None
        stop(vhpcd.process)


@pytest.mark.promise("attack.replay")
def test_a_captured_request_is_of_no_use(vhpcd: Vhpcd, daemon: Munged) -> None:
    """To somebody on the network who has all bytes of a request, and sends them again or sooner."""
    lease = vhpcd.client.open_generation(request(1), allocation("n1"))
    clean = wire.Acknowledge(generation=str(lease.generation), node="n1", clean=True)
    captured = sealed(vhpcd, clean)
    assert isinstance(sent(vhpcd, captured, NODE), wire.Done)
    assert sent(vhpcd, captured, LOGIN) is None
    assert "Replayed credential" in vhpcd.log
    # sooner than its owner, who was kept from sending it
    caught = sealed(vhpcd, clean)
    assert refusal(sent(vhpcd, caught, LOGIN)) == f"{LOGIN} may not send requests of node n1"
    assert sent(vhpcd, caught, NODE) is None, "and its owner has to ask again, as clients do"
    # another munged has not seen it: that of a host that was started again
    with munged(daemon.key) as fresh:
        payload = Munge(str(fresh.socket)).decode(captured[4:]).payload
    (nonce,) = [wire.unwrap(payload, "request").nonce]
    again = frame_of(vhpcd.munge().encode(wire.wrap("request", nonce, clean)))
    assert refusal(sent(vhpcd, again, NODE)) == "vhpcd has seen this request before"


# --- floods ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def flooding(vhpcd: Vhpcd, kind: str, source: str, uid: int, seconds: float = 6.0) -> Iterator[None]:
    """Another user's flood, from an address."""
    script = FLOOD.read_text()
    if source != "127.0.0.1":
        script = script.replace(
            "one = socket.socket()\n", f"one = socket.socket(); one.bind(('{source}', 0))\n"
        )
        assert source in script
    port = str(vhpcd.config.controller.port)
    munge = vhpcd.config.controller.munge_socket
    with subprocess.Popen(
        ["/usr/bin/python3", "-S", "-c", script, kind, "127.0.0.1", port, str(seconds), munge],
        user=uid,
        group=uid,
        extra_groups=[],
        cwd="/",
        env={"PATH": "/usr/bin:/bin"},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        time.sleep(1.5)
        yield
        said, _ = process.communicate(timeout=seconds + 30)
        assert process.returncode == 0
        # munged takes its time for the credentials of a stranger
        assert int(said.split()[1]) > (20 if kind == "stranger" else 100), "that was no flood"


def took(vhpcd: Vhpcd, source: str, port: int) -> float:
    began = time.monotonic()
    assert isinstance(asked(vhpcd, wire.AskStatus(), source, port), Status)
    return time.monotonic() - began


@pytest.mark.promise("vhpcd.flood", "attack.flood")
@pytest.mark.parametrize("kind", ["silent", "payload", "storm"])
@pytest.mark.parametrize("source", [LOGIN, NODE, "127.0.0.1"], ids=["login", "node", "own host"])
def test_a_flood_of_a_user_delays_root_of_no_host(vhpcd: Vhpcd, kind: str, source: str) -> None:
    requests = []
    with flooding(vhpcd, kind, source, NOBODY):
        for turn in range(12):
            for place, port in ((NODE, 902 + turn), ("127.0.0.1", 0), ("127.0.0.1", 932 + turn)):
                requests.append(took(vhpcd, place, port))
            time.sleep(0.1)
    assert undelayed(requests), requests
    lines = vhpcd.log.splitlines()
    assert len(lines) < 60, "the log is not for him to fill"
    assert "Traceback" not in vhpcd.log


def test_data_of_unknown_peers_is_bounded(vhpcd: Vhpcd) -> None:
    assert vhpcd.process is not None
    statm = Path(f"/proc/{vhpcd.process.pid}/statm")

    def resident() -> int:
        return int(statm.read_text().split()[1]) * 4096

    before = resident()
    with contextlib.ExitStack() as held:
        links: list[socket.socket] = []
        for _ in range(60):
            links.append(held.enter_context(from_port(vhpcd, LOGIN)))
            with contextlib.suppress(OSError):
                links[-1].sendall(struct.pack(">I", 1 << 20) + b"MUNGE:" + b"A" * ((1 << 20) - 7))
        # the last ones are those that were not dropped
        assert is_open(links[-1])
        assert sum(map(is_open, links)) < 30
        # 60 MiB were sent; 16 MiB are held, each of them in two buffers for a moment
        assert resident() - before < 48 << 20
        assert took(vhpcd, NODE, 903) < PATIENCE_S
    assert "is closed: its address " in vhpcd.log


def is_open(link: socket.socket) -> bool:
    """Whether the other side waits for more."""
    link.settimeout(0.05)
    try:
        return link.recv(1) != b""
    except TimeoutError:
        return True
    except OSError:
        return False


@pytest.mark.promise("attack.flood")
def test_credentials_of_other_users_are_decoded_one_by_one(vhpcd: Vhpcd) -> None:
    with flooding(vhpcd, "stranger", LOGIN, NOBODY):
        requests = [took(vhpcd, NODE, 904 + turn) for turn in range(20)]
    assert undelayed(requests), requests


@pytest.mark.promise("attack.flood")
def test_a_user_of_the_own_host_is_not_taken_for_root(vhpcd: Vhpcd) -> None:
    """Room for the controller's own is for root and SlurmUser, and not for whoever logs in there."""
    port = vhpcd.config.controller.port

    def hold(expected: int) -> Any:
        links = [socket.create_connection(("127.0.0.1", port)) for _ in range(60)]
        time.sleep(0.5)
        until = time.monotonic() + limit(30)
        while (alive := sum(map(is_open, links))) > expected and time.monotonic() < until:
            pass
        return alive

    assert as_uid(NOBODY, lambda: hold(32)) == 32
    assert hold(60) == 60


def test_unknown_generations_are_acknowledged_by_their_nodes(vhpcd: Vhpcd) -> None:
    body = wire.Acknowledge(generation=str(Generation(9, 0, "00000009")), node="n1", clean=True)
    assert isinstance(asked(vhpcd, body, NODE), wire.Done)
