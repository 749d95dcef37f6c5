# SPDX-License-Identifier: Apache-2.0
"""A libvirt that takes no more connections: the job is requeued, operators are told; a drain comes later."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from boot_rig import GENERATION, boot_layout
from prolog_rig import Node, prolog_node
from stepd import needs_root

from vhpc_slurm.controller.client import ControllerClient
from vhpc_slurm.errors import NodeError
from vhpc_slurm.hooks import epilog
from vhpc_slurm.node.finding import Kind
from vhpc_slurm.node.guest import libvirtd
from vhpc_slurm.node.resource.domain import Domain
from vhpc_slurm.node.store import statefile
from vhpc_slurm.node.store.journal import Journal
from vhpc_slurm.node.store.layout import Layout

layout, node = boot_layout, prolog_node
pytestmark = needs_root
BUSY = libvirtd.BusyError("cannot connect to libvirt", "libvirt did not answer within 30 s")


class Clock:
    """The node's uptime."""

    def __init__(self) -> None:
        self.now = 5000.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(statefile, "uptime", lambda: found.now)
    return found


@pytest.fixture
def full(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    assert node  # which has a libvirt that answers

    def connect(*_: object) -> None:
        raise BUSY

    monkeypatch.setattr(libvirtd, "connect", connect)


@pytest.fixture
def silent(run_dir: str) -> Iterator[str]:
    """The URI of a libvirt that accepts no connection, as one that has its most clients; 3 of them wait."""
    path = Path(run_dir) / "libvirt/libvirt-sock"
    path.parent.mkdir()
    clients = [socket.socket(socket.AF_UNIX) for _ in range(3)]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(10)
        for client in clients:
            client.connect(str(path))
        yield f"qemu+unix:///system?socket={path}"
    for client in clients:
        client.close()


class LibvirtError(Exception):
    """As libvirt.libvirtError."""

    def get_error_message(self) -> str:
        return str(self)

    def get_error_code(self) -> int:
        return 38


def open_connection(uri: str) -> None:
    """As libvirt.open(), whose first call waits for the daemon's answer."""
    with socket.socket(socket.AF_UNIX) as one:
        try:
            one.connect(uri.partition("socket=")[2])
        except OSError as err:
            raise LibvirtError(str(err)) from err
        one.recv(1)


def test_full_libvirt_is_distinguished_from_a_stopped_one(
    silent: str, monkeypatch: pytest.MonkeyPatch, run_dir: str
) -> None:
    module = ModuleType("libvirt")
    for name, value in (
        ("open", open_connection),
        ("libvirtError", LibvirtError),
        ("registerErrorHandler", lambda *_: None),
    ):
        setattr(module, name, value)
    monkeypatch.setitem(sys.modules, "libvirt", module)
    monkeypatch.setattr(libvirtd, "CONNECT_S", 0.5)
    with pytest.raises(libvirtd.BusyError) as full:
        libvirtd.Hypervisor(silent, 60.0)
    assert full.value.why.startswith("libvirt did not answer within ")
    assert int(full.value.why.split()[-2]) >= 3
    with pytest.raises(NodeError, match="No such file") as absent:
        libvirtd.Hypervisor(f"qemu+unix:///system?socket={run_dir}/none", 60.0)
    assert not isinstance(absent.value, libvirtd.BusyError)


@pytest.mark.promise("libvirt.busy", "attack.libvirt")
@pytest.mark.usefixtures("full", "clock")
def test_full_libvirt_requeues_the_job_and_drains_nothing(node: Node) -> None:
    assert node.run() == 0
    assert (node.requeued, node.drained, node.held) == ([42], [], [])


@pytest.mark.promise("libvirt.busy")
@pytest.mark.usefixtures("full")
def test_libvirt_that_stays_full_drains_the_node(node: Node, clock: Clock) -> None:
    for minutes in (0, 2, 4):
        clock.now = 5000.0 + 60 * minutes
        assert node.run() == 0
    clock.now = 5000.0 + 301
    with pytest.raises(libvirtd.BusyError):
        node.run()
    assert node.requeued == [42, 42, 42]
    assert [line.partition(":")[0] for line in node.drained] == ["cannot connect to libvirt"]
    assert node.held == []


@pytest.mark.promise("libvirt.busy")
def test_libvirt_that_is_full_at_times_drains_nothing(
    node: Node, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    working = libvirtd.connect

    def connect(*_: object) -> None:
        raise BUSY

    for seconds, it in ((0, connect), (100, working), (310, connect), (310 + 3600, connect)):
        clock.now = 5000.0 + seconds
        monkeypatch.setattr(libvirtd, "connect", it)
        node.run()
    assert (len(node.requeued), node.drained) == (3, [])


@pytest.mark.promise("libvirt.busy")
@pytest.mark.usefixtures("full")
def test_health_check_drains_when_libvirt_stays_full(layout: Layout, clock: Clock) -> None:
    kinds = []
    for seconds in (0, 120, 240, 360):
        clock.now = 5000.0 + seconds
        kinds += [finding.kind for finding in Domain().orphans(layout)]
    assert kinds == [Kind.LIBVIRT_BUSY] * 3 + [Kind.LIBVIRT]


@pytest.mark.promise("libvirt.busy")
@pytest.mark.usefixtures("full", "clock")
def test_full_libvirt_is_an_alarm_for_operators(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.run()
    Journal(node.layout.journals, GENERATION).close()
    monkeypatch.setattr(ControllerClient, "look", lambda *_: None)
    assert epilog.run(node.layout.config) == 0
    assert [(ack.clean, ack.note) for ack in node.acknowledged] == [
        (True, "alarm: cannot connect to libvirt: libvirt did not answer within 30 s")
    ]
