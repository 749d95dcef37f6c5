# SPDX-License-Identifier: Apache-2.0
"""How much munge does for a job on a node, and what a hook does while munged is kept busy."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from controller_lab import HAVE_MUNGED, allocation, request
from vhpcd_process import Vhpcd

from vhpc_slurm.config import Config
from vhpc_slurm.controller.api import protocol as wire
from vhpc_slurm.controller.client import ControllerClient
from vhpc_slurm.hooks import epilog
from vhpc_slurm.model import Figures, GuestUsage, LeaseState, NodeUsage
from vhpc_slurm.munge import Munge, MungeBusyError, MungeMissingError
from vhpc_slurm.node.store import outbox, statefile, usage
from vhpc_slurm.node.store.journal import Journal
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.node.store.outbox import Acknowledgement
from vhpc_slurm.reconcile import acknowledging

pytestmark = pytest.mark.skipif(not HAVE_MUNGED, reason="needs munged: apt install munge")


@pytest.fixture
def credentials(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """This process's requests to munged; vhpcd is another process."""
    asked: list[str] = []
    encode, decode = Munge.encode, Munge.decode

    def counting_encode(*args: object, **how: object) -> bytes:
        asked.append("encode")
        return encode(*args, **how)  # type: ignore[arg-type]

    def counting_decode(*args: object) -> object:
        asked.append("decode")
        return decode(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(Munge, "encode", counting_encode)
    monkeypatch.setattr(Munge, "decode", counting_decode)
    return asked


def ended(vhpcd: Vhpcd, *nodes: str) -> tuple[Acknowledgement, NodeUsage]:
    client = vhpcd.client
    generation = client.open_generation(request(), allocation(*nodes)).generation
    for node in nodes:
        client.lease(42, 0, node, 5.0)
    client.ending(42, 0)
    used = NodeUsage(generation, "n1", (GuestUsage(0, Figures(cpu_us=7)),))
    return Acknowledgement(generation, "n1", clean=True, usage=used), used


def test_one_credential_reports_and_acknowledges(
    vhpcd: Vhpcd, tmp_path: Path, credentials: list[str]
) -> None:
    ack, used = ended(vhpcd, "n1", "n2")
    credentials.clear()
    outbox.put(tmp_path / "outbox", ack)
    assert acknowledging.deliver(vhpcd.config, vhpcd.client, tmp_path / "outbox") == 0
    assert credentials == ["encode", "decode"]
    (record,) = vhpcd.client.leases()
    assert (record.lease.state, record.acknowledged) == (LeaseState.ENDING, ("n1",))
    assert vhpcd.client.usage(42)[1] == (used,)


@pytest.mark.promise("munge.silent", "attack.munged")
def test_an_epilog_needs_one_credential(
    vhpcd: Vhpcd, credentials: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ack, used = ended(vhpcd, "n1", "n2")
    paths = {key: str(tmp_path / "node" / key) for key in ("state", "run", "log")}
    config = msgspec.structs.replace(vhpcd.config, paths=msgspec.convert({"paths": paths}, Config).paths)
    layout = Layout(config)
    layout.journals.mkdir(parents=True)
    layout.job(42).mkdir(parents=True)
    journal = Journal(layout.journals, ack.generation)
    journal.acquire("rundir", f"rundir:{layout.job(42)}", path=str(layout.job(42)))
    journal.close()
    state = statefile.header(ack.generation, "debian:latest") | {"status": "ready", "console": "no"}
    statefile.write_state(layout.state_file(42), state, 0)
    for name, value in (("SLURM_JOB_ID", "42"), ("SLURM_JOB_UID", "2001"), ("SLURMD_NODENAME", "n1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(usage, "of_node", lambda *_: used)
    credentials.clear()
    assert epilog.run(config) == 0
    assert credentials == ["encode", "decode"]
    (record,) = vhpcd.client.leases()
    assert record.acknowledged == ("n1",)


def test_an_older_vhpcd_gets_single_requests(
    vhpcd: Vhpcd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ack, used = ended(vhpcd, "n1", "n2")
    ask = ControllerClient._ask
    sent: list[str] = []

    def older(self: ControllerClient, body: wire.Request, *rest: object) -> object:
        sent.append(type(body).__name__)
        if isinstance(body, wire.Together):
            body = wire.Acknowledge(generation="unknown", node="n1", clean=True)
        return ask(self, body, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(ControllerClient, "_ask", older)
    outbox.put(tmp_path / "outbox", ack)
    assert acknowledging.deliver(vhpcd.config, vhpcd.client, tmp_path / "outbox") == 0
    assert sent == ["Together", "ReportUsage", "Acknowledge"]
    assert vhpcd.client.usage(42)[1] == (used,)


def test_requests_in_one_credential_are_checked_separately(vhpcd: Vhpcd) -> None:
    """One of them cannot be used; the other is done, and a repetition of the credential is refused."""
    ack, used = ended(vhpcd, "n1", "n2")
    del used
    good = wire.Acknowledge(generation=str(ack.generation), node="n1", clean=True)
    bad = wire.Acknowledge(generation="nonsense", node="n1", clean=True)
    sealed = wire.wrap("request", f"{7:032x}", wire.Together(requests=(bad, good)))
    answer = vhpcd.tell(sealed)
    assert isinstance(answer, wire.Answers)
    assert [getattr(one, "kind", "done") for one in answer.answers] == ["unusable", "done"]
    (record,) = vhpcd.client.leases()
    assert record.acknowledged == ("n1",)
    again = vhpcd.tell(sealed)
    assert isinstance(again, wire.Failure)
    assert again.what == "vhpcd has seen this request before"


# --- a munged that is busy ------------------------------------------------------------------------


@pytest.fixture
def busy(tmp_path: Path) -> Iterator[Path]:
    """A munged whose queue of connections is full, as a flood of one user leaves it."""
    path = tmp_path / "busy.socket"
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.socket(socket.AF_UNIX))
        listening.bind(str(path))
        listening.listen(0)
        for _ in range(3):
            one = stack.enter_context(socket.socket(socket.AF_UNIX))
            one.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                one.connect(str(path))
        yield path


def test_a_busy_munged_is_not_a_missing_one(busy: Path) -> None:
    with pytest.raises(MungeBusyError) as caught:
        Munge(str(busy)).encode(b"")
    assert "munged is busy" in caught.value.line()
    with pytest.raises(MungeMissingError):
        Munge(str(busy.with_name("none"))).encode(b"")


@pytest.mark.promise("munge.silent", "attack.munged")
def test_a_request_survives_a_busy_munged(vhpcd: Vhpcd, busy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = vhpcd.config.controller.munge_socket
    client = vhpcd.client
    client._munge = Munge(str(busy))

    def passes() -> None:
        time.sleep(3)
        client._munge = Munge(real)

    thread = threading.Thread(target=passes)
    thread.start()
    assert client.leases() == []
    thread.join()
