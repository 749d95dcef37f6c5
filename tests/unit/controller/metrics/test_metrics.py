# SPDX-License-Identifier: Apache-2.0
"""Metrics of vhpcd over HTTP and of nodes in a file; dashboard and alert rules know their names."""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from controller_lab import (
    HAVE_MUNGED,
    Munged,
    allocation,
    free_port,
    request,
    stop,
    wait_for,
)
from prometheus_client.parser import text_string_to_metric_families
from vhpcd_fabric import Ack
from vhpcd_process import Vhpcd, make

from pace import limit
from vhpc_slurm.config import Config, Host, Paths, load
from vhpc_slurm.controller.api.status_messages import DeviceWire
from vhpc_slurm.controller.metrics.exposition import AT_ONCE
from vhpc_slurm.errors import NodeError
from vhpc_slurm.hooks import healthcheck, textfile
from vhpc_slurm.model import Generation, GuestUsage, ImageRef, Stage, Timeline
from vhpc_slurm.model.usage import GpuUsage
from vhpc_slurm.node.finding import Kind
from vhpc_slurm.node.store import statefile
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.reconcile import sofar
from vhpc_slurm.reconcile.finding import RepairResult

ROOT = Path(__file__).parents[4]
needs_munged = pytest.mark.skipif(not HAVE_MUNGED, reason="needs munged: apt install munge")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="files of root: run as root")


class _OverSocket(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("vhpcd", timeout=10)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(str(self._path))


Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def parsed(text: str) -> Samples:
    """By prometheus_client's own parser: (name, labels) to value."""
    return {
        (one.name, tuple(sorted(one.labels.items()))): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }


@dataclass
class Metered:
    """A vhpcd with metrics at a Unix socket."""

    vhpcd: Vhpcd
    socket: Path

    def text(self) -> str:
        link = _OverSocket(self.socket)
        link.request("GET", "/metrics")
        answer = link.getresponse()
        assert answer.status == 200
        assert answer.headers["Content-Type"].startswith("text/plain")
        return answer.read().decode()

    def samples(self) -> Samples:
        return parsed(self.text())

    def value(self, name: str, **labels: str) -> float | None:
        return self.samples().get((name, tuple(sorted(labels.items()))))


def configure(vhpcd: Vhpcd, where: str, more: str = "") -> None:
    path = vhpcd.folder / "vhpc.toml"
    text, count = re.subn(r"(?m)^metrics = .*$", f'metrics = "{where}"', path.read_text())
    assert count == 1
    path.write_text(text + more)


@pytest.fixture
def stopped(tmp_path: Path, daemon: Munged) -> Iterator[Vhpcd]:
    found = make(tmp_path, daemon)
    yield found
    if found.process is not None:
        stop(found.process)


POLICY = '\n[[policy]]\nname = "no networks"\nusers = ["eve"]\nnetworks = []\n'


@pytest.fixture
def metered(stopped: Vhpcd) -> Metered:
    where = stopped.folder / "metrics.sock"
    configure(stopped, str(where), POLICY)
    (stopped.folder / "sinfo.out").touch()  # no node is drained
    stopped.start()
    return Metered(stopped, where)


@needs_munged
def test_the_life_of_a_job_is_counted(metered: Metered) -> None:
    client = metered.vhpcd.client
    assert metered.value("vhpc_leases", state="ready") == 0
    lease = client.open_generation(request(), allocation("n1"))
    assert metered.value("vhpc_leases", state="ready") == 1
    boot = (
        Stage("plan", 10.0, 10.1),
        Stage("start g0", 10.1, 10.6),
        Stage("agent g0", 10.6, 11.9),
        Stage("setup g0", 11.9, 12.0),
    )
    client.report_timeline(Timeline(lease.generation, "n1", boot))
    client.ending(42, 0)
    ended = Timeline(lease.generation, "n1", (*boot, Stage("power off", 20.0, 20.5)))
    client.acknowledge(Ack(lease.generation, "n1", timeline=ended))
    found = metered.samples()
    assert found["vhpc_leases", (("state", "released"),)] == 1
    assert found["vhpc_boots_total", (("result", "ready"),)] == 1
    assert found["vhpc_boot_seconds_sum", ()] == pytest.approx(2.0)
    assert found["vhpc_boot_seconds_bucket", (("le", "1.0"),)] == 0
    assert found["vhpc_boot_seconds_bucket", (("le", "2.0"),)] == 1
    assert found["vhpc_stage_seconds_count", (("stage", "agent"),)] == 1, "of the boot only, once"
    assert found["vhpc_stage_seconds_sum", (("stage", "power off"),)] == pytest.approx(0.5)
    assert found["vhpc_teardowns_total", (("result", "clean"),)] == 1
    assert found["vhpc_requests_total", (("request", "open"), ("result", "ok"))] == 1
    assert found["vhpc_fabric_safe", ()] == 1
    assert found["vhpc_queue_length", (("queue", "database"),)] == 0


@needs_munged
def test_refusals_and_failures_are_counted_by_cause(metered: Metered) -> None:
    client = metered.vhpcd.client
    client.open_generation(request(1, image=ImageRef("nix")), allocation("n1"))
    client.open_generation(request(2, user="eve"), allocation("n1"))
    client.open_generation(request(3), allocation("n1", memory_mib=100))
    lease = client.open_generation(request(4), allocation("n1"))
    client.report_timeline(Timeline(lease.generation, "n1", (Stage("plan", 1.0, 2.0, "failed: no"),)))
    client.report_timeline(Timeline(lease.generation, "n1", (Stage("lease", 1.0, 2.0),)))
    client.acknowledge(Ack(lease.generation, "n1", clean=False, note="a device is stuck"))
    found = metered.samples()
    refused = {dict(labels)["cause"]: n for (name, labels), n in found.items() if "refusals_total" in name}
    assert refused == {"image": 1, "policy": 1, "size": 1}
    assert found["vhpc_boots_total", (("result", "failed"),)] == 1
    assert found["vhpc_boots_total", (("result", "ended"),)] == 1
    assert found["vhpc_boot_seconds_count", ()] == 0
    assert found["vhpc_teardowns_total", (("result", "unclean"),)] == 1


@needs_munged
def test_drained_nodes_and_devices_in_quarantine_are_counted(stopped: Vhpcd) -> None:
    where = stopped.folder / "metrics.sock"
    configure(stopped, str(where))
    path = stopped.folder / "vhpc.toml"
    text, count = re.subn(r"(?m)^reconcile_interval_s = .*$", "reconcile_interval_s = 1.0", path.read_text())
    assert count == 1
    path.write_text(text)
    # a node in two partitions is printed twice; others drain nodes, too
    drained = "n1|vhpc: libvirtd is down\nn1|vhpc: libvirtd is down\nn2|Prolog error\nn3|bad vhpc: disk\n"
    (stopped.folder / "drained").write_text(drained)
    sinfo = stopped.folder / "bin/sinfo"
    sinfo.write_text(f'#!/bin/sh\ncase "$*" in *--states=drain*) cat {stopped.folder}/drained;; esac\n')
    stopped.start()
    metered = Metered(stopped, where)
    wait_for(lambda: metered.value("vhpc_nodes_drained") == 1, "the drained node is not counted")
    (stopped.folder / "drained").unlink()
    wait_for(lambda: metered.value("vhpc_nodes_drained") is None, "Slurm does not answer")
    assert metered.value("vhpc_devices_in_quarantine") == 0
    device = DeviceWire(address="0000:3b:00.0", role="gpu", reason="stuck", since=1.0)
    stopped.client.report_quarantine("n1", [device])
    stopped.client.report_quarantine("n2", [device, device])
    assert metered.value("vhpc_devices_in_quarantine") == 3
    stopped.client.report_quarantine("n2", [])
    assert metered.value("vhpc_devices_in_quarantine") == 1


@pytest.mark.promise("attack.metrics")
@needs_munged
def test_no_user_job_or_node_is_named(metered: Metered) -> None:
    lease = metered.vhpcd.client.open_generation(request(424242, user="mallory"), allocation("secretnode"))
    metered.vhpcd.client.lease(424242, 0, "secretnode", 5.0)
    text = metered.text()
    assert not [word for word in ("424242", "mallory", "secretnode", lease.generation.nonce) if word in text]


@needs_munged
def test_metrics_on_a_port(stopped: Vhpcd) -> None:
    port = free_port()
    configure(stopped, f"127.0.0.1:{port}")
    stopped.start()
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    link.request("GET", "/metrics")
    assert "vhpc_build_info" in link.getresponse().read().decode()


@needs_munged
def test_a_port_in_use_costs_the_metrics_only(stopped: Vhpcd) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        configure(stopped, f"127.0.0.1:{other.getsockname()[1]}")
        stopped.start()
        assert "there are no metrics: cannot serve metrics at 127.0.0.1:" in stopped.log
        assert stopped.client.status().version


@needs_munged
def test_the_socket_of_a_killed_vhpcd_is_replaced(metered: Metered) -> None:
    metered.vhpcd.kill()
    assert metered.socket.is_socket()
    metered.vhpcd.start()
    assert metered.value("vhpc_fabric_safe") == 1
    metered.vhpcd.stop()
    assert not metered.socket.exists()


@needs_munged
def test_a_file_at_the_path_of_the_socket_stays(stopped: Vhpcd) -> None:
    where = stopped.folder / "metrics.sock"
    where.write_text("precious")
    configure(stopped, str(where))
    stopped.start()
    assert "something else than a socket" in stopped.log
    assert where.read_text() == "precious"


@pytest.mark.promise("attack.metrics")
@needs_munged
def test_idle_connections_delay_others_only_briefly(metered: Metered) -> None:
    idle = [socket.socket(socket.AF_UNIX) for _ in range(AT_ONCE + 3)]
    try:
        for one in idle:
            one.connect(str(metered.socket))
        assert metered.vhpcd.client.status().version, "requests are served elsewhere"
        idle[-1].settimeout(5)
        assert idle[-1].recv(1) == b"", "one connection too many is closed"
    finally:
        for one in idle:
            one.close()
    deadline = time.monotonic() + limit(30)
    while True:
        try:
            assert metered.value("vhpc_fabric_safe") == 1
            break
        except (http.client.HTTPException, ConnectionError):
            assert time.monotonic() < deadline
            time.sleep(0.1)


@pytest.mark.parametrize(
    "where", ["9633", "localhost:", "localhost:port", "metrics.sock", "127.0.0.1:123456", "http://x:1/"]
)
def test_an_invalid_address_of_metrics_is_refused(tmp_path: Path, where: str) -> None:
    file = tmp_path / "vhpc.toml"
    file.write_text(f'[controller]\nmetrics = "{where}"\n')
    with pytest.raises(NodeError, match="metrics"):
        load(file)


# --- nodes ---------------------------------------------------------------------------------------


def node_config(tmp_path: Path) -> Config:
    folder = tmp_path / "textfile"
    folder.mkdir()
    paths = Paths(run=str(tmp_path / "run"), state=str(tmp_path / "state"), log=str(tmp_path / "log"))
    return Config(host=Host(metrics_folder=str(folder)), paths=paths)


@needs_root
def test_a_health_check_writes_the_metrics_of_its_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = node_config(tmp_path)
    results = [RepairResult(Kind.ORPHAN_PIN, "a pin", repaired=True)] * 2
    monkeypatch.setattr(healthcheck, "reconcile", lambda *args, **options: results)
    began = time.time()
    assert healthcheck.run(config) == 0
    file = Path(config.host.metrics_folder) / "vhpc.prom"
    assert file.stat().st_mode & 0o777 == 0o644, "node_exporter is not root"
    found = parsed(file.read_text())
    pins = [("kind", "orphan-pin"), ("repaired", "yes")]
    assert found["vhpc_node_findings", tuple(pins)] == 2
    assert found["vhpc_node_generations", ()] == 0
    assert began <= found["vhpc_node_health_check_timestamp_seconds", ()] <= time.time()
    assert [path.name for path in file.parent.iterdir()] == ["vhpc.prom"]


@pytest.mark.promise("usage.gpus")
@needs_root
def test_gpus_have_slurms_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a job with two guests; its second guest names one GPU of two, so their indexes are not known."""
    config = node_config(tmp_path)
    layout = Layout(config)
    layout.state_file(7).parent.mkdir(parents=True)
    statefile.write_state(layout.state_file(7), {"gpus": "3:1,0:2"}, 0)
    first = GpuUsage("0000:fe:00.0", 8340, 10 << 30, 312_500)
    second = GpuUsage("0000:fd:00.0", 0)
    guests = [GuestUsage(0, gpus=(first, second)), GuestUsage(1, gpus=(first,))]
    monkeypatch.setattr(sofar, "measure", lambda _: {Generation(7, 0, "0123abcd"): guests})
    monkeypatch.setattr(healthcheck, "reconcile", lambda *args, **options: [])
    assert healthcheck.run(config) == 0
    found = parsed((Path(config.host.metrics_folder) / "vhpc.prom").read_text())
    busy, memory, power = (
        f"vhpc_node_gpu_{name}" for name in ("busy_ratio", "peak_memory_bytes", "power_watts")
    )
    known = {(name, labels[0][1]): value for (name, labels), value in found.items() if "_gpu_" in name}
    assert known == {(busy, "3"): 0, (busy, "1"): 0.834, (memory, "1"): 10 * 2**30, (power, "1"): 312.5}


def of_somebody_else(folder: Path) -> None:
    os.chown(folder, 65534, 65534)


def a_link(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))
    folder.symlink_to("elsewhere")


def a_link_inside(folder: Path) -> None:
    (folder / "vhpc.prom.part").symlink_to(folder.parent / "victim")


@needs_root
@pytest.mark.parametrize("change", [of_somebody_else, a_link, a_link_inside])
def test_links_and_folders_of_others_are_not_followed(
    tmp_path: Path, change: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = node_config(tmp_path)
    folder = Path(config.host.metrics_folder)
    change(folder)
    with pytest.raises(NodeError, match=r"cannot write .*vhpc\.prom"):
        textfile.write(folder, Layout(config), [], {})
    assert not (tmp_path / "victim").exists()
    monkeypatch.setattr(healthcheck, "reconcile", lambda *args, **options: [])
    assert healthcheck.run(config) == 0, "the node is as good as others"


# --- what reads them -----------------------------------------------------------------------------

METRIC = re.compile(r"\bvhpc_[a-z_]+")


@needs_munged
@needs_root
def test_dashboard_and_rules_use_metrics_that_exist(metered: Metered, tmp_path: Path) -> None:
    metered.vhpcd.client.open_generation(request(image=ImageRef("nix")), allocation("n1"))
    wait_for(lambda: metered.value("vhpc_nodes_drained") == 0, "the first pass does not end")
    config = node_config(tmp_path)
    textfile.write(Path(config.host.metrics_folder), Layout(config), [], {})
    text = metered.text() + (Path(config.host.metrics_folder) / "vhpc.prom").read_text()
    families = {family.name: family.type for family in text_string_to_metric_families(text)}
    suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
    known = {name + suffix for name, kind in families.items() for suffix in suffixes.get(kind, ("",))}
    # only after an audit of a real fabric
    known.add("vhpc_fabric_audited_timestamp_seconds")
    dashboard = json.loads((ROOT / "contrib/grafana/vhpc.json").read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    rules = (ROOT / "contrib/prometheus/vhpc.rules.yml").read_text()
    asked += re.findall(r"(?m)^ +expr: (.*(?:\n {10,}.*)*)", rules)
    used = {name for expression in asked for name in METRIC.findall(expression)}
    assert len(asked) > 25
    assert used - known == set()
