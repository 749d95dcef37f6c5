# SPDX-License-Identifier: Apache-2.0
"""Metrics of a real job: of vhpcd and of a node; Prometheus' own tool checks them and the alert rules."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Lab
from injection import configured, settled

pytestmark = pytest.mark.lab

SOCKET, FOLDER = "/var/lib/vhpc/vhpcd/metrics.sock", "/run/textfile"
GET = (
    "import socket, sys; link = socket.socket(socket.AF_UNIX); link.connect(sys.argv[1]);"
    r"link.sendall(b'GET /metrics HTTP/1.0\r\n\r\n'); file = link.makefile('rb');"
    r"print(file.read().partition(b'\r\n\r\n')[2].decode(), end='')"
)


@pytest.fixture
def metrics(lab: Lab) -> Iterator[None]:
    """vhpcd and the health check of n1 have metrics."""
    toml = "/etc/vhpc/vhpc.toml"
    lab.run("n1", "mkdir", "-p", FOLDER)
    try:
        lab.run("n1", "cp", "-p", toml, f"{toml}.before")
        lab.run("n1", "sh", "-ec", f"cat >>{toml}", stdin=f'\n[host]\nmetrics_folder = "{FOLDER}"\n')
        with configured(lab, "ctl", "controller", 'metrics = "{}"'.format(SOCKET.replace("/", "\\/"))):
            lab.service("ctl", "restart", "vhpcd")
            yield
    finally:
        lab.service("ctl", "restart", "vhpcd")
        lab.run("n1", "sh", "-c", f"mv -f {toml}.before {toml}; rm -rf {FOLDER}")


def test_the_alert_rules_are_valid(lab: Lab) -> None:
    rules = (Path(__file__).parents[2] / "contrib/prometheus/vhpc.rules.yml").read_text()
    said = lab.run("ctl", "sh", "-ec", "cat >/tmp/r.yml; promtool check rules /tmp/r.yml", stdin=rules).out
    assert "SUCCESS" in said


@pytest.mark.usefixtures("metrics")
def test_a_job_is_seen_in_the_metrics(lab: Lab) -> None:
    job = lab.finish("true", "-w", "n1")
    assert job.accounted("State") == ["COMPLETED"]
    settled(lab)
    refused = lab.submit("true", "--vhpc-image=no-such-image")
    assert refused.wait("FAILED") == "FAILED"
    lab.run("n1", "/usr/libexec/vhpc/healthcheck")
    seen = lab.run("ctl", "/opt/vhpc/bin/python", "-c", GET, SOCKET).out
    node = lab.run("n1", "cat", f"{FOLDER}/vhpc.prom").out
    for text in (seen, node):
        checked = lab.run("ctl", "promtool", "check", "metrics", stdin=text, check=False)
        assert checked.code == 0, checked.err
    lines = set(seen.splitlines())
    assert 'vhpc_boots_total{result="ready"} 1.0' in lines
    assert 'vhpc_boots_total{result="ended"} 1.0' in lines, "the refused job"
    assert 'vhpc_teardowns_total{result="clean"} 2.0' in lines, "both Epilogs"
    assert 'vhpc_lease_refusals_total{cause="image"} 1.0' in lines
    assert 'vhpc_stage_seconds_count{stage="agent"} 1.0' in lines
    assert "vhpc_node_generations 0.0" in node.splitlines()
