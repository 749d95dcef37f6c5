# SPDX-License-Identifier: Apache-2.0
"""Usage of running jobs in a node's health check, and the daemons' counts for shared folders."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from node_rig import node_layout

from vhpc_slurm.controller.client import ControllerClient
from vhpc_slurm.errors import FabricError, TeardownError
from vhpc_slurm.hooks import common, healthcheck
from vhpc_slurm.model import Generation, GuestUsage, NodeUsage, SharedIo
from vhpc_slurm.node import teardown
from vhpc_slurm.node.finding import Kind
from vhpc_slurm.node.guest import usage, wire
from vhpc_slurm.node.guest.channel import GuestChannel
from vhpc_slurm.node.guest.usage import AskedGuest
from vhpc_slurm.node.host import process
from vhpc_slurm.node.host.process import ProcessRef
from vhpc_slurm.node.resource.domain import held_guests
from vhpc_slurm.node.store import joblock, journal
from vhpc_slurm.node.store import usage as stored
from vhpc_slurm.node.store.journal import Journal
from vhpc_slurm.node.store.layout import Layout, domain_name
from vhpc_slurm.reconcile import sofar
from vhpc_slurm.reconcile.finding import RepairResult

if TYPE_CHECKING:
    from guest_rig import Guest

pytest_plugins = ["guest_rig"]

WAIT_S = 30
layout = node_layout
root = pytest.mark.skipif(os.getuid() != 0, reason="only root may send control operations: run as root")
FIRST, SECOND = Generation(7, 0, "0123abcd"), Generation(8, 0, "0123abcd")
WRITTEN, READ = 5_000_000, 30_000_000
# Reads and writes as virtiofsd does, at positions, and waits.
DAEMON = f"""
import os, sys
with open(sys.argv[1], "wb+", buffering=0) as file:
    os.pwritev(file.fileno(), [bytes({WRITTEN})], 0)
    for _ in range({READ // WRITTEN}):
        os.preadv(file.fileno(), [bytearray({WRITTEN})], 0)
    sys.stdout.write("x")
    sys.stdout.flush()
    sys.stdin.read()
"""
OWN = 16 << 20
"""More than an interpreter reads of its own files when it starts."""


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has read and written as much as it says."""
    argv = [sys.executable, "-ISE", "-c", DAEMON, str(tmp_path / "file")]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.read(1) == b"x"
        yield child
        child.kill()


def ref(child: subprocess.Popen[bytes]) -> ProcessRef:
    return ProcessRef(child.pid, process.start_time(child.pid) or 0)


def held(
    layout: Layout, generation: Generation, guests: int = 1, *daemons: dict[str, Any], index: int = 0
) -> None:
    """A journal as a Prolog leaves it, and the folders of its guests."""
    with ExitStack() as opened:
        book = Journal(layout.journals, generation)
        opened.callback(book.close)
        for number in range(guests):
            layout.guest(generation.job_id, number).mkdir(parents=True)
            name = domain_name(generation, number)
            book.acquire("domain", f"domain:{name}", name=name, uid=1)
        for number, data in enumerate(daemons):
            book.acquire("process", f"process:g{index}:virtiofsd:site{number}", role="virtiofsd", **data)
        book.acquire("process", f"process:g{index}:shim", role="shim", pid=1, started=1)


def attach(layout: Layout, generation: Generation, guest: Guest, index: int = 0) -> None:
    (layout.guest(generation.job_id, index) / "root.sock").symlink_to(guest.socket)


class Client(ControllerClient):
    """A client without a vhpcd: it notes what it is told."""

    told: list[tuple[str, list[NodeUsage]]]

    def report_usage_so_far(self, node: str, usage: Any) -> None:
        self.told = [*getattr(self, "told", []), (node, list(usage))]


# --- shared folders ------------------------------------------------------------------


@pytest.mark.promise("usage.files")
def test_a_daemons_reads_and_writes_are_counted(daemon: subprocess.Popen[bytes]) -> None:
    read, written = usage.transferred(ref(daemon)) or (0, 0)
    assert written == WRITTEN + 1  # and one byte to the test
    assert READ <= read < READ + OWN


def test_the_counts_of_a_process_that_has_ended_are_not_known(daemon: subprocess.Popen[bytes]) -> None:
    before = ref(daemon)
    assert usage.transferred(ProcessRef(before.pid, before.started + 1)) is None
    daemon.kill()
    daemon.wait(WAIT_S)
    assert usage.transferred(before) is None


def test_daemons_of_a_guest_are_found_in_the_journal(layout: Layout) -> None:
    held(layout, FIRST, 2, {"pid": 10, "started": 1}, {"pid": 11, "started": 2})
    entries = journal.read_entries(layout.journals, FIRST)
    first, second = held_guests(layout, entries)
    assert (first.folder, second.folder) == (layout.guest(7, 0), layout.guest(7, 1))
    assert first.daemons == (ProcessRef(10, 1), ProcessRef(11, 2))
    assert second.daemons == ()


def test_a_daemon_without_a_pid_makes_the_sum_unknown(layout: Layout) -> None:
    held(layout, FIRST, 1, {"pid": 10, "started": 1}, {})
    (only,) = held_guests(layout, journal.read_entries(layout.journals, FIRST))
    assert only.daemons is None
    assert usage.of_guests([only]) == (GuestUsage(0, missing="the guest had ended"),)


@root
def test_the_end_of_a_job_has_its_shared_folders(
    layout: Layout, guest: Guest, daemon: subprocess.Popen[bytes]
) -> None:
    one = ref(daemon)
    held(layout, FIRST, 1, {"pid": one.pid, "started": one.started})
    attach(layout, FIRST, guest)
    guest.run("true", SLURM_STEP_ID="0")
    entries = journal.read_entries(layout.journals, FIRST)
    teardown.keep_usage(layout, FIRST, entries)
    daemon.kill()
    daemon.wait(WAIT_S)
    teardown.keep_usage(layout, FIRST, entries)  # a second Epilog finds the daemon gone
    found = stored.of_node(layout.usage(FIRST), FIRST, "n1")
    assert found is not None
    (used,) = found.guests
    assert [step.step for step in used.steps] == ["0"]
    assert used.shared is not None
    assert used.shared.written_bytes == WRITTEN + 1


# --- the health check ----------------------------------------------------------------


@root
def test_one_message_has_all_running_jobs_of_the_node(layout: Layout, guest: Guest) -> None:
    held(layout, FIRST, 2)
    held(layout, SECOND)
    attach(layout, FIRST, guest)
    attach(layout, SECOND, guest)
    run = guest.popen("sh", "-c", "echo up; exec sleep 1000", SLURM_STEP_ID="5")
    guest.run("true", SLURM_STEP_ID="4")
    assert run.stdout is not None
    assert run.stdout.readline() == b"up\n"
    client = Client(layout.config)
    sofar.tell(client, "n1", sofar.measure(layout))
    ((node, told),) = client.told
    assert (node, [(one.generation, one.node) for one in told]) == ("n1", [(FIRST, "n1"), (SECOND, "n1")])
    first, second = told[0].guests
    assert {step.step: step.tasks for step in first.steps} == {"4": 1, "5": 1}
    assert (second.index, second.missing) == (1, "the guest had ended")
    assert first.shared == SharedIo(0, 0)
    run.terminate()
    run.communicate(timeout=WAIT_S)


def test_jobs_that_boot_or_end_are_not_asked(layout: Layout) -> None:
    client = Client(layout.config)
    sofar.tell(client, "n1", sofar.measure(layout))
    held(layout, FIRST)
    held(layout, SECOND)
    joblock.write_tombstone(layout, SECOND)
    with joblock.held(layout, FIRST.job_id, timeout_s=WAIT_S):
        sofar.tell(client, "n1", sofar.measure(layout))
    assert not hasattr(client, "told")
    sofar.tell(client, "n1", sofar.measure(layout))
    assert [one.generation for one in client.told[0][1]] == [FIRST]


@pytest.fixture
def silent(programs: Path, tmp_path: Path) -> Iterator[Guest]:
    """A guest whose agent has said hello, and then nothing more."""
    from guest_rig import Guest

    folder = tmp_path / "silent"
    folder.mkdir()
    it = Guest(programs, folder, agent=False)
    end = wire.FrameStream(it.agent_end)
    versions = wire.put(wire.Tag.VERSION_MIN, 1) + wire.put(wire.Tag.VERSION_MAX, 1)
    end.send(wire.FrameType.HELLO, versions, time.monotonic() + WAIT_S)
    with GuestChannel.connect(it.socket, WAIT_S) as channel:
        channel.hello(WAIT_S)  # or the guest counts as booting
    yield it
    it.close()


@pytest.mark.promise("usage.running", "attack.usage")
@root
def test_a_silent_guest_delays_no_other(layout: Layout, guest: Guest, silent: Guest) -> None:
    held(layout, FIRST, 3)
    attach(layout, FIRST, silent, 0)
    attach(layout, FIRST, silent, 1)
    attach(layout, FIRST, guest, 2)
    guest.run("true", SLURM_STEP_ID="0")
    client = Client(layout.config)
    sofar.tell(client, "n1", sofar.measure(layout))
    ((_, (told,)),) = client.told
    assert ["deadline" in one.missing for one in told.guests] == [True, True, False]
    assert [step.step for step in told.guests[2].steps] == ["0"]


def test_many_guests_share_the_rows_of_a_node(layout: Layout) -> None:
    assert usage.of_guests([]) == ()
    asked = [AskedGuest(layout.run / f"g{index}") for index in range(40)]
    found = usage.of_guests(asked, 100)
    assert [one.index for one in found] == list(range(40))


@pytest.mark.promise("usage.running")
def test_a_vhpcd_that_refuses_figures_fails_no_health_check(
    layout: Layout, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As one of an earlier version does."""

    def refuse(*_: object) -> None:
        raise FabricError("vhpcd cannot read the request")

    caplog.set_level("INFO", "vhpc")
    held(layout, FIRST)
    monkeypatch.setattr(ControllerClient, "report_usage_so_far", refuse)
    monkeypatch.setattr(healthcheck, "reconcile", lambda *_, **__: [])
    assert healthcheck.run(layout.config) == 0
    assert "vhpcd is not told what running jobs have used: vhpcd cannot read the request" in caplog.text


def test_nothing_is_measured_while_vhpcd_is_away(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(sofar, "measure", lambda *_: asked.append(1))
    away = RepairResult(Kind.CONTROLLER, "vhpcd does not answer", repaired=False)
    monkeypatch.setattr(healthcheck, "reconcile", lambda *_, **__: [away])
    assert healthcheck.run(layout.config) == 0
    assert asked == []


def test_a_node_is_drained_before_guests_are_asked(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def drain(*said: object) -> None:
        assert isinstance(said[2], TeardownError)
        order.append("drain")

    def ask(_: Layout) -> sofar.Measured:
        order.append("ask")
        return {}

    monkeypatch.setattr(sofar, "measure", ask)
    monkeypatch.setattr(common, "drain", drain)
    broken = RepairResult(Kind.LIBVIRT, "libvirt does not answer", repaired=False)
    monkeypatch.setattr(healthcheck, "reconcile", lambda *_, **__: [broken])
    assert healthcheck.run(layout.config) == 1
    assert order == ["drain", "ask"]


def test_figures_fit_into_a_message(layout: Layout) -> None:
    """Of as many guests, with as many rows, as a node may tell at once."""
    from vhpc_slurm.controller.api import protocol, usage_messages
    from vhpc_slurm.model import FIGURE_MAX, Figures, StepUsage
    from vhpc_slurm.model.usage import GpuUsage

    largest = Figures(*[FIGURE_MAX - 1] * 8)
    steps = tuple(StepUsage(f"{2**32 - 1 - number}", largest, 2**31) for number in range(sofar.STEPS_MAX))
    gpu = GpuUsage("ffff:ff:ff.f", 10_000, FIGURE_MAX - 1, FIGURE_MAX - 1)
    shared, gpus = SharedIo(2**63 - 1, 2**63 - 1), (gpu,) * usage.GPUS_MAX
    one = GuestUsage(0, largest, steps, FIGURE_MAX, "", shared, gpus, "w" * 200)
    body = usage_messages.ReportUsageSoFar(
        node="n" * 64,
        used=(usage_messages.GenerationUsage(generation="4294967295.999999999.0123abcd", guests=(one,)),),
    )
    # munge adds a third, as it writes base64
    assert len(msgspec.json.encode(body)) * 4 / 3 < protocol.MAX_MESSAGE / 2
