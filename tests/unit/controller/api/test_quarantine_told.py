# SPDX-License-Identifier: Apache-2.0
"""Nodes tell vhpcd of their devices in quarantine, and operators see them in its status and on the page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from controller_lab import HAVE_MUNGED, Munged, munged, stop
from vhpcd_process import Vhpcd, make

from vhpc_slurm.cli.web import gathering, overview
from vhpc_slurm.config import Config, Paths
from vhpc_slurm.controller.api.quarantine import MAX_SHOWN, Quarantine
from vhpc_slurm.controller.api.status_messages import MAX_DEVICES, MAX_REASON, DeviceWire, ReportQuarantine
from vhpc_slurm.hooks import healthcheck
from vhpc_slurm.node.devices import quarantine
from vhpc_slurm.node.store.layout import Layout

needs_munged = pytest.mark.skipif(not HAVE_MUNGED, reason="needs munged (apt install munge)")
GPU = "0000:3b:00.0"


@pytest.fixture(scope="module")
def key() -> Iterator[Munged]:
    with munged() as daemon:
        yield daemon


@pytest.fixture
def vhpcd(key: Munged, tmp_path: Path) -> Iterator[Vhpcd]:
    found = make(tmp_path, key, request_timeout_s=2).start()
    yield found
    if found.process is not None:
        stop(found.process)


@pytest.fixture
def node(vhpcd: Vhpcd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """A node whose health check finds nothing."""
    monkeypatch.setattr(healthcheck, "reconcile", lambda *args, **options: [])
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    for name in ("node", "node/state", "node/run"):
        (tmp_path / name).mkdir()
    paths = Paths(state=str(tmp_path / "node/state"), run=str(tmp_path / "node/run"))
    return msgspec.structs.replace(vhpcd.config, paths=paths)


def shown(vhpcd: Vhpcd) -> list[tuple[str, str, str]]:
    found = vhpcd.client.status().quarantine
    return [(one.node, device.address, device.reason) for one in found for device in one.devices]


@pytest.mark.promise("devices.shown")
@needs_munged
def test_a_device_is_shown_until_it_is_cleared(vhpcd: Vhpcd, node: Config) -> None:
    layout = Layout(node)
    quarantine.put(layout, quarantine.record(GPU, "gpu", "it does not answer\nafter a reset"))
    assert healthcheck.run(node) == 0
    assert shown(vhpcd) == [("n7", GPU, "it does not answer after a reset")]
    vhpcd.stop()
    vhpcd.start()
    assert shown(vhpcd) == []
    assert healthcheck.run(node) == 0
    assert len(shown(vhpcd)) == 1, "a vhpcd that has forgotten it is told again"
    quarantine.remove(layout, GPU)
    assert healthcheck.run(node) == 0
    assert shown(vhpcd) == []


@pytest.mark.promise("devices.shown")
@needs_munged
def test_a_report_is_sent_when_vhpcd_is_back(vhpcd: Vhpcd, node: Config) -> None:
    layout = Layout(node)
    quarantine.put(layout, quarantine.record(GPU, "gpu", "stuck"))
    assert healthcheck.run(node) == 0
    quarantine.remove(layout, GPU)
    vhpcd.stop()
    assert healthcheck.run(node) == 0, "the node stays in service"
    vhpcd.start()
    vhpcd.client.report_quarantine("n7", [device("stuck")])
    assert healthcheck.run(node) == 0
    assert shown(vhpcd) == []


@needs_munged
def test_a_node_without_quarantine_sends_nothing(vhpcd: Vhpcd, node: Config) -> None:
    vhpcd.stop()
    assert healthcheck.run(node) == 0
    assert not Layout(node).quarantine_told.exists()


@needs_munged
def test_operators_see_it_on_the_page(vhpcd: Vhpcd, node: Config) -> None:
    quarantine.put(Layout(node), quarantine.record(GPU, "gpu", "stuck"))
    assert healthcheck.run(node) == 0
    found = gathering.Overview((), {}, (), {}, trouble=vhpcd.client.trouble())
    whole = overview.document(found)
    assert [(one["node"], one["text"]) for one in whole["attention"]] == [("n7", f"gpu {GPU}: stuck")]
    assert [(one["node"], one["address"]) for one in whole["quarantine"]] == [("n7", GPU)]
    others = overview.document(of_user(found))
    assert (others["attention"], others["quarantine"]) == ([], []), "who is no operator"


def of_user(found: gathering.Overview) -> gathering.Overview:
    return gathering.Overview(found.live, found.progress, found.newest, found.reports)


def device(reason: str) -> DeviceWire:
    return DeviceWire(address=GPU, role="gpu", reason=reason, since=1.0)


def test_a_status_with_all_nodes_fits_into_a_message() -> None:
    kept = Quarantine()
    worst = tuple(device("\x01" * MAX_REASON) for _ in range(MAX_DEVICES))
    for number in range(2000):
        kept.report(ReportQuarantine(node=f"n{number:04}", devices=worst))
    found = kept.shown()
    assert len(msgspec.json.encode(found)) < 300_000, "a message has 1 MiB, and munge adds a third"
    assert sum(len(one.devices) for one in found) <= MAX_SHOWN
    assert [one.node for one in found] == sorted(one.node for one in found)
