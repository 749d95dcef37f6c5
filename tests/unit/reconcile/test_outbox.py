# SPDX-License-Identifier: Apache-2.0
"""Acknowledgements that vhpcd cannot use, or does not take now, delay no others."""

from __future__ import annotations

import logging
import random
from pathlib import Path

import msgspec
import pytest
from controller_lab import HAVE_MUNGED, allocation, request
from doctor_rig import one
from vhpcd_process import Vhpcd

from vhpc_slurm.cli.host.checks import Level
from vhpc_slurm.cli.host.checks import node as node_checks
from vhpc_slurm.config import Config
from vhpc_slurm.controller.api import protocol as wire
from vhpc_slurm.controller.client import ControllerClient
from vhpc_slurm.controller.exchange import AnswerError, UnusableError
from vhpc_slurm.errors import FabricError, UserError, VhpcError
from vhpc_slurm.model import Generation, LeaseRecord, LeaseState, Stage, Timeline
from vhpc_slurm.node.finding import Kind
from vhpc_slurm.node.store import outbox
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.node.store.outbox import Acknowledgement
from vhpc_slurm.reconcile import acknowledging, audit, run

needs_munged = pytest.mark.skipif(not HAVE_MUNGED, reason="needs munged: apt install munge")


def ack(number: int, **other: object) -> Acknowledgement:
    values = {"generation": Generation(number, 0, "0123abcd"), "node": "n1", "clean": True} | other
    return msgspec.convert(values, Acknowledgement)


def put(folder: Path, count: int) -> list[Acknowledgement]:
    acks = [ack(number) for number in range(1, count + 1)]
    for each in acks:
        outbox.put(folder, each)
    return acks


class Picky(ControllerClient):
    """A client of a vhpcd that answers some acknowledgements with an error."""

    def __init__(self, errors: dict[int, VhpcError]) -> None:
        self.errors = errors
        self.taken: list[Acknowledgement] = []

    def acknowledge(self, ack: object) -> None:
        assert isinstance(ack, Acknowledgement)
        if ack.generation.job_id in self.errors:
            raise self.errors[ack.generation.job_id]
        self.taken.append(ack)


UNUSABLE = UnusableError("vhpcd cannot use that request", "invalid note")


@pytest.mark.promise("ack.set-aside")
def test_an_unusable_acknowledgement_delays_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    acks = put(tmp_path, 3)
    client = Picky({1: UNUSABLE})
    with caplog.at_level(logging.ERROR, "vhpc"):
        assert acknowledging.deliver(Config(), client, tmp_path) == 0
    assert client.taken == acks[1:]
    assert outbox.pending(tmp_path) == []
    (aside,) = outbox.set_aside(tmp_path)
    assert msgspec.json.decode(aside.read_bytes(), type=Acknowledgement) == acks[0]
    assert f"{tmp_path}/1.0.0123abcd.json is set aside: vhpcd cannot use that request: invalid note" in (
        caplog.text
    )


@pytest.mark.promise("ack.set-aside")
@pytest.mark.parametrize(
    "why", [AnswerError("Slurm has no node n1"), UserError("vhpcd refuses uid 0")], ids=["fabric", "user"]
)
def test_an_acknowledgement_not_taken_now_delays_no_other(tmp_path: Path, why: VhpcError) -> None:
    acks = put(tmp_path, 3)
    client = Picky({1: why})
    assert acknowledging.deliver(Config(), client, tmp_path) == 1
    assert client.taken == acks[1:]
    assert outbox.queued(tmp_path) == {acks[0].generation}
    client.errors = {}
    assert acknowledging.deliver(Config(), client, tmp_path) == 0
    assert client.taken == [*acks[1:], acks[0]]


def test_many_not_taken_are_tried_in_turns(tmp_path: Path) -> None:
    acks = put(tmp_path, 6)
    client = Picky(dict.fromkeys(range(1, 6), AnswerError("vhpcd does not take it")))
    assert acknowledging.deliver(Config(), client, tmp_path) == 6, "a hook has little time"
    assert acknowledging.deliver(Config(), client, tmp_path) == 5
    assert client.taken == [acks[5]]


def test_an_unreachable_vhpcd_is_asked_once(tmp_path: Path) -> None:
    put(tmp_path, 3)
    tries: list[int] = []

    def send(each: Acknowledgement) -> None:
        tries.append(each.generation.job_id)
        raise FabricError("vhpcd does not answer")

    assert outbox.flush(tmp_path, send) == 3
    assert tries == [1]
    assert outbox.set_aside(tmp_path) == []


def test_an_acknowledgement_without_room_delays_no_other(tmp_path: Path) -> None:
    client = Picky({1: UNUSABLE, 2: AnswerError("not now")})
    acknowledging.deliver(Config(), client, tmp_path, [ack(1), ack(2), ack(3)])
    assert client.taken == [ack(3)]


# --- what an operator sees ----------------------------------------------------------------------


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    paths = {key: str(tmp_path / key) for key in ("state", "run", "log")}
    return Layout(msgspec.convert({"paths": paths}, Config))


@pytest.mark.promise("ack.set-aside")
def test_reconcile_reports_acknowledgements_set_aside(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    owed: list[Generation] = [ack(1).generation]
    client = Picky({1: UNUSABLE})
    monkeypatch.setattr(client, "leases", lambda **_: [], raising=False)
    monkeypatch.setattr(run, "ControllerClient", lambda *_, **__: client)
    monkeypatch.setattr(run, "_owed", lambda *_: owed)
    monkeypatch.setattr(audit, "audit", lambda *_: [])
    outbox.put(layout.outbox, ack(1))
    results = {result.kind: result for result in run.reconcile(layout.config, "n1", check=False)}
    found = results[Kind.REFUSED_ACKNOWLEDGEMENT]
    assert found.what == f"the acknowledgement {layout.outbox}/1.0.0123abcd.refused was set aside: " + (
        "it cannot be used"
    )
    assert found.error.startswith("vhpcd still waits for it: the reason is in hooks.log")
    assert not found.drains
    client.errors.clear()
    results = {result.kind: result for result in run.reconcile(layout.config, "n1", check=False)}
    assert results[Kind.UNACKNOWLEDGED].repaired, "a new one is made from what is on the node"
    assert [one.note for one in client.taken] == ["cleared by reconcile"]
    owed.clear()
    (result,) = run.reconcile(layout.config, "n1", check=False)
    assert (result.kind, result.repaired) == (Kind.REFUSED_ACKNOWLEDGEMENT, True)
    assert run.reconcile(layout.config, "n1", check=False) == []


def test_a_damaged_acknowledgement_is_reported(layout: Layout, caplog: pytest.LogCaptureFixture) -> None:
    acks = put(layout.outbox, 2)
    (layout.outbox / f"{acks[0].generation}.json").write_text("{")
    client = Picky({})
    with caplog.at_level(logging.ERROR, "vhpc"):
        acknowledging.deliver(layout.config, client, layout.outbox)
    assert client.taken == acks[1:]
    assert "is set aside: it cannot be read" in caplog.text
    assert [path.name for path in outbox.set_aside(layout.outbox)] == [f"{acks[0].generation}.damaged"]


def test_an_unknown_file_in_the_outbox_stops_no_health_check(layout: Layout) -> None:
    put(layout.outbox, 1)
    (layout.outbox / "notes.json").write_text("{}")
    assert list(audit.unacknowledged(layout, "n1", [ack(1).generation])) == []


@pytest.mark.promise("ack.set-aside")
def test_doctor_shows_the_outbox(layout: Layout) -> None:
    def level() -> tuple[Level, str]:
        found = one(list(node_checks.acknowledgements(layout.config)), "node.outbox")
        return found.level, found.what

    assert level() == (Level.OK, "no acknowledgement waits for vhpcd")
    put(layout.outbox, 2)
    assert level() == (Level.WARN, "2 acknowledgements wait for vhpcd")
    acknowledging.deliver(layout.config, Picky({1: UNUSABLE}), layout.outbox)
    assert level() == (Level.ERROR, "1 acknowledgements were set aside: vhpcd cannot use 1.0.0123abcd")


# --- with a vhpcd -------------------------------------------------------------------------------


@pytest.mark.promise("ack.set-aside")
@needs_munged
def test_generation_with_an_unusable_timeline_is_released(vhpcd: Vhpcd, tmp_path: Path) -> None:
    """Its timeline is longer than vhpcd takes, also compressed."""
    folder, client, noise = tmp_path / "outbox", vhpcd.client, random.Random(1)
    for job_id in (1, 2):
        lease = client.open_generation(request(job_id), allocation("n1"))
        client.lease(job_id, 0, "n1", 5.0)
        client.ending(job_id, 0)
        stage = Stage("plan", 1.0, 2.0, noise.randbytes(1 << 20).hex() if job_id == 1 else "")
        line = Timeline(lease.generation, "n1", (stage,))
        outbox.put(folder, Acknowledgement(lease.generation, "n1", clean=True, timeline=line))
    assert acknowledging.deliver(vhpcd.config, client, folder) == 0
    records: list[LeaseRecord] = client.leases()
    assert [record.lease.state for record in records] == [LeaseState.RELEASED] * 2
    assert outbox.set_aside(folder) == []


@needs_munged
def test_vhpcd_says_that_it_cannot_use_a_request(vhpcd: Vhpcd) -> None:
    malformed = wire.Acknowledge(generation="nonsense", node="n1", clean=True)
    answer = vhpcd.tell(wire.wrap("request", f"{1:032x}", malformed))
    assert isinstance(answer, wire.Failure)
    assert (answer.kind, answer.what) == ("unusable", "vhpcd cannot use that request")
    answer = vhpcd.tell(wire.wrap("request", f"{2:032x}", malformed).replace(b'"node":"n1"', b'"node":7'))
    assert isinstance(answer, wire.Failure)
    assert (answer.kind, answer.what) == ("unusable", "vhpcd cannot read the request")
    assert "the request Acknowledge cannot be used: " in vhpcd.log
    assert "cannot be read: " in vhpcd.log
