# SPDX-License-Identifier: Apache-2.0
"""Guests learn the members of their cluster; a silent guest delays no other."""

from __future__ import annotations

import contextlib
import errno
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from dataclasses import replace as changed
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from cluster_lab import member_lease
from follower_rig import member, with_gone

from vhpc_slurm.config import Config
from vhpc_slurm.errors import NodeError
from vhpc_slurm.model import SshKeys
from vhpc_slurm.node.boot import follower
from vhpc_slurm.node.guest.channel import ChannelError, ChannelRefusedError, GuestChannel
from vhpc_slurm.node.host import process
from vhpc_slurm.node.resource import cluster_guests
from vhpc_slurm.node.resource.cluster_guests import ClusterGuests
from vhpc_slurm.node.resource.domain import DomainData
from vhpc_slurm.node.store.journal import Journal
from vhpc_slurm.node.store.layout import Layout

KEYS = SshKeys("private host", "host key 42", "private user", "user key 42")
LEASE = changed(member_lease(42, 5042, "n1", "n2", first=4, each=2), ssh=KEYS)
KNOWN = follower.of(LEASE)
OLD, NEW = member(7, "n3", "n4", first=1), member(50, "n6", first=9)


@dataclass
class Node:
    """The second node of the job; ``errors`` has what happens in the next calls to a guest."""

    guests: ClusterGuests
    told: dict[str, list[tuple[Any, ...]]] = field(default_factory=dict)
    errors: dict[str, list[Callable[[], object]]] = field(default_factory=dict)

    def connect(self, path: Path, _timeout_s: float) -> Any:
        channel = SimpleNamespace(name=path.parent.name, hello=lambda *_, **__: None)
        return contextlib.nullcontext(channel)

    def tell(self, channel: Any, *words: Any) -> None:
        for what in self.errors.get(channel.name, [])[:1]:
            self.errors[channel.name].remove(what)
            what()
        self.told.setdefault(channel.name, []).append(words[:-1])


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    paths = {name: str(tmp_path / name) for name in ("state", "run", "log")}
    layout = Layout(msgspec.convert({"paths": paths}, Config))
    journal = Journal(layout.journals, LEASE.generation)
    for index in range(2):
        name = f"vhpc-42-0-{LEASE.generation.nonce}-g{index}"
        journal.announce("domain", f"domain:{name}", DomainData(name, 991_201 + index))
    journal.close()
    found = Node(ClusterGuests(layout, LEASE.generation, KNOWN.own, "n2"))
    monkeypatch.setattr(GuestChannel, "connect", found.connect)
    monkeypatch.setattr(cluster_guests, "tell", found.tell)
    return found


def failing(error: Exception) -> Callable[[], object]:
    def fail() -> None:
        raise error

    return fail


def test_each_guest_gets_all_members_by_address(node: Node) -> None:
    known = changed(KNOWN, version=5, others=(with_gone(OLD, 1), NEW))
    assert node.guests.tell(known) == ()
    (state,) = node.told["g0"]
    assert node.told["g1"] == [state]
    name, own_job, guests, host_publics, user_publics, uid = state
    assert (name, own_job, uid) == ("mesh", 42, LEASE.request.uid)
    assert [(one.hostname, one.job_id, one.ipv4, one.ipv6) for one in guests] == [
        ("n3-j7", 7, "10.200.0.2", "fd76:6870:6300::2"),
        ("n1-g0-j42", 42, "10.200.0.5", "fd76:6870:6300::5"),
        ("n1-g1-j42", 42, "10.200.0.6", "fd76:6870:6300::6"),
        ("n2-g0-j42", 42, "10.200.0.7", "fd76:6870:6300::7"),
        ("n2-g1-j42", 42, "10.200.0.8", "fd76:6870:6300::8"),
        ("n6-j50", 50, "10.200.0.10", "fd76:6870:6300::a"),
    ]
    assert guests[0].slots == guests[-1].slots == 2
    assert host_publics == ("host key 7", "host key 42", "host key 50")
    assert user_publics == ("user key 7", "user key 42", "user key 50")


def test_what_a_guest_knows_already_is_not_repeated(node: Node) -> None:
    for version in (5, 6):
        node.guests.tell(changed(KNOWN, version=version, others=(OLD,)))
    assert len(node.told["g0"]) == 1
    node.guests.tell(changed(KNOWN, version=7))
    assert [len(state[2]) for state in node.told["g1"]] == [6, 4]


def test_a_guest_that_fails_is_named_once_and_told_later(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    node.errors["g1"] = [failing(ChannelError("no answer")), failing(NodeError("cannot connect"))]
    assert [node.guests.tell(KNOWN) for _ in range(3)] == [("n2-g1",), ("n2-g1",), ()]
    assert [len(node.told[name]) for name in ("g0", "g1")] == [1, 1]
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert lines == ["guest n2-g1 does not take the members of its cluster: no answer"]


def test_a_guest_that_hangs_costs_a_limited_time(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_guests, "TELL_S", 0.2)
    node.errors["g0"] = [lambda: time.sleep(3)]
    began = time.monotonic()
    assert node.guests.tell(KNOWN) == ("n2-g0",)
    assert time.monotonic() - began < 2
    assert len(node.told["g1"]) == 1


def test_an_older_agent_is_not_asked_again(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    node.errors["g0"] = [failing(ChannelRefusedError("refused", errno.ENOSYS))]
    assert [node.guests.tell(KNOWN) for _ in range(2)] == [(), ()]
    assert "guest n2-g0 does not show the members of its cluster: its agent is too old" in caplog.text
    assert "g0" not in node.told


def test_guests_without_a_process_have_gone(node: Node) -> None:
    woken: list[int] = []
    node.guests.watch(lambda: woken.append(1))
    assert node.guests.all() == node.guests.gone() == (2, 3)
    assert node.guests.tell(KNOWN) == ()
    assert node.told == {}
    assert list(process.of_uid(991_201)) == []
