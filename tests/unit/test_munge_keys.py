# SPDX-License-Identifier: Apache-2.0
"""The munge key of a site is replaced: munged is restarted, and nothing of vhpc is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from controller_lab import HAVE_MUNGED, Munged, allocation, munged, request, stop
from vhpcd_process import Vhpcd, make

from vhpc_slurm.config import Config
from vhpc_slurm.controller.client import ControllerClient
from vhpc_slurm.errors import FabricError
from vhpc_slurm.model import LeaseState
from vhpc_slurm.node.store import outbox
from vhpc_slurm.reconcile import acknowledging

pytestmark = pytest.mark.skipif(not HAVE_MUNGED, reason="needs munged: apt install munge")


@pytest.fixture
def controller() -> Iterator[Munged]:
    """The munged of vhpcd's host."""
    with munged() as daemon:
        yield daemon


@pytest.fixture
def vhpcd(tmp_path: Path, controller: Munged) -> Iterator[Vhpcd]:
    found = make(tmp_path, controller, request_timeout_s=2).start()
    yield found
    assert found.process is not None, "it was never restarted"
    stop(found.process)


def rekeyed(daemon: Munged, key: bytes) -> Munged:
    """The munged of a host, restarted with another key."""
    daemon.stop()
    return Munged(daemon.folder, key)


def of_node(vhpcd: Vhpcd, daemon: Munged) -> Config:
    """The configuration of a host with this munged."""
    settings = msgspec.structs.replace(vhpcd.config.controller, munge_socket=str(daemon.socket))
    return msgspec.structs.replace(vhpcd.config, controller=settings)


@pytest.mark.promise("keys.renew")
def test_vhpcd_uses_a_new_key_without_a_restart(vhpcd: Vhpcd, controller: Munged) -> None:
    vhpcd.client.open_generation(request(1), allocation())
    new = rekeyed(controller, os.urandom(128))
    try:
        assert vhpcd.client.lease(1, 0, "n1", 5).state is LeaseState.READY
        assert len(vhpcd.client.leases()) == 1
    finally:
        new.stop()


@pytest.mark.promise("keys.renew")
def test_another_munge_key_is_reported_and_loses_nothing(
    vhpcd: Vhpcd, controller: Munged, tmp_path: Path
) -> None:
    """Its acknowledgement waits; the others are served meanwhile."""
    lease = vhpcd.client.open_generation(request(1), allocation("n1"))
    vhpcd.client.lease(1, 0, "n1", 5)
    vhpcd.client.ending(1, 0)
    ack = outbox.Acknowledgement(lease.generation, "n1", clean=True)
    outbox.put(tmp_path / "outbox", ack)
    with munged() as node:
        config = of_node(vhpcd, node)
        client = ControllerClient(config)
        with pytest.raises(FabricError, match=r"does not answer: .*does this host have the same munge\.key"):
            client.leases()
        assert acknowledging.deliver(config, client, tmp_path / "outbox") == 1
        assert "Invalid credential" in vhpcd.log
        (record,) = vhpcd.client.leases()
        assert record.lease.state is LeaseState.ENDING
        new = rekeyed(node, controller.key)
        try:
            assert acknowledging.deliver(config, client, tmp_path / "outbox") == 0
        finally:
            new.stop()
    (record,) = vhpcd.client.leases()
    assert record.lease.state is LeaseState.RELEASED


@pytest.mark.promise("clock.hour-off")
def test_a_host_whose_clock_is_an_hour_off_gets_the_reason(vhpcd: Vhpcd, controller: Munged) -> None:
    """vhpcd and all others continue; this host does so when its clock is right again."""
    vhpcd.client.open_generation(request(1), allocation("n1"))
    for shift_s in (3600, -3600):
        with munged(controller.key, shift_s=shift_s) as node:
            client = ControllerClient(of_node(vhpcd, node))
            with pytest.raises(FabricError, match="compare the clocks of both hosts"):
                client.lease(1, 0, "n1", 0)
            assert len(vhpcd.client.leases()) == 1
    with munged(controller.key) as node:
        assert ControllerClient(of_node(vhpcd, node)).lease(1, 0, "n1", 0).state is LeaseState.READY
