# SPDX-License-Identifier: Apache-2.0
"""The serving process of a boot: who starts one, and that the journal ends it, also after a kill."""

from __future__ import annotations

import dataclasses
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from boot_rig import boot_layout, prepared
from stepd import needs_root

from pace import limit
from vhpc_slurm.config import Config
from vhpc_slurm.model import Allocation
from vhpc_slurm.node.boot import peers, start
from vhpc_slurm.node.boot.state import Boot
from vhpc_slurm.node.host import process
from vhpc_slurm.node.resource import registry
from vhpc_slurm.node.store.journal import Journal
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.node.store.peers import offers
from vhpc_slurm.node.store.peers import process as serving

layout = boot_layout
pytestmark = [needs_root, pytest.mark.xdist_group("slurmstepd")]


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture(name="work")
def work_of_two_nodes(layout: Layout, port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Boot]:
    """A boot on n1, the first of two nodes."""
    raw = msgspec.to_builtins(layout.config)
    raw["images"]["peer_port"] = port
    work = prepared(Layout(msgspec.convert(raw, Config)), monkeypatch).work
    (part,) = work.lease.allocation.nodes
    both = Allocation((part, dataclasses.replace(part, node="n2")))
    work = dataclasses.replace(work, lease=dataclasses.replace(work.lease, allocation=both))
    yield work
    for ref, _ in process.marked(str(work.lease.generation)):
        process.end(ref)


def servers(work: Boot) -> list[int]:
    return [ref.pid for ref, _ in process.marked(str(work.lease.generation))]


def server(work: Boot) -> int:
    """The process that serves, once the one that started it has gone."""
    until = time.monotonic() + limit(30)
    while len(found := servers(work)) != 1:
        assert time.monotonic() < until, found
        time.sleep(0.05)
    (pid,) = found
    return pid


def test_the_first_node_serves_until_its_journal_is_released(work: Boot, port: int) -> None:
    for _ in start.stage_image(work):
        pass
    pid = server(work)
    assert work.journal.entry("process:peers").data["pid"] == pid
    with socket.create_connection(("127.0.0.1", port), 5):
        pass
    offer = offers.read(work.layout, str(work.lease.generation))
    assert offer is not None
    assert offer.nodes == ("n1", "n2")
    (noted,) = (stage for stage in work.recorder.timeline().stages if stage.name == start.SOURCES)
    assert noted.detail == f"catalogue {sum(b.size for b in offer.blobs)}"
    assert registry.release_all(work.layout, work.journal) == []
    assert servers(work) == []


@pytest.mark.promise("peers.process")
def test_a_prolog_killed_before_it_notes_the_pid_leaks_nothing(
    work: Boot, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(work.journal, "update", killed)
        with pytest.raises(KeyboardInterrupt):
            peers.begin(work)
    server(work)
    work.journal.close()
    again = Journal(work.layout.journals, work.lease.generation)
    assert [entry.key for entry in again.held() if entry.kind == "process"] == ["process:peers"]
    assert registry.release_all(work.layout, again) == []
    assert servers(work) == []


@pytest.mark.promise("attack.peer-answer")
def test_two_jobs_of_a_node_listen_on_one_port_and_a_user_cannot(port: int) -> None:
    with serving.listen(port), serving.listen(port):
        os.seteuid(65534)
        try:
            with socket.socket() as users:
                users.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                with pytest.raises(OSError, match="in use"):
                    users.bind(("", port))
        finally:
            os.seteuid(0)


def test_a_port_in_use_costs_no_job(work: Boot, port: int) -> None:
    with socket.socket() as other:
        other.bind(("", port))
        other.listen()
        lineage = peers.begin(work)
    assert lineage is not None
    assert lineage.sources == ()
    assert servers(work) == []


@pytest.mark.parametrize("why", ["one node", "no port", "no children"])
def test_a_node_without_askers_starts_no_process(work: Boot, why: str) -> None:
    first, second = work.lease.allocation.nodes
    nodes = {"one node": (first,), "no port": (first, second), "no children": (second, first)}[why]
    lease = dataclasses.replace(work.lease, allocation=Allocation(nodes))
    work = dataclasses.replace(work, lease=lease)
    if why == "no port":
        raw = msgspec.to_builtins(work.layout.config)
        raw["images"]["peer_port"] = 0
        work = dataclasses.replace(work, layout=Layout(msgspec.convert(raw, Config)))
    found = peers.begin(work)
    assert (found.sources if found else None) == {"no children": ("n2",)}.get(why)
    assert servers(work) == []
    assert not Path(work.layout.job(42) / offers.NAME).exists()
