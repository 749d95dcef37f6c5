# SPDX-License-Identifier: Apache-2.0
"""Metrics of a real job, as Prometheus reads them; it evaluates the dashboard and the alert rules on them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cluster import Lab
from injection import configured, settled, until

pytestmark = pytest.mark.lab

CONTRIB = Path(__file__).parents[2] / "contrib"
ADDRESS, NODE_ADDRESS, PROMETHEUS = "127.0.0.1:9633", "127.0.0.1:9634", "127.0.0.1:9635"
FOLDER, DATA = "/run/textfile", "/run/prometheus-of-a-test"
GET = "import sys, urllib.request as r; sys.stdout.buffer.write(r.urlopen(sys.argv[1], timeout=20).read())"
ASK = (
    "import sys, urllib.parse as p, urllib.request as r;"
    "sys.stdout.buffer.write(r.urlopen(sys.argv[1] + p.quote(sys.argv[2]), timeout=20).read())"
)
PANELS_OF_TROUBLE = {"Errors", "Findings of health checks"}
"""They have no data as long as all is well."""
PANELS_OF_A_FABRIC = {"Last good audit"}
SETTINGS = f"""
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
rule_files: [{DATA}/vhpc.rules.yml]
scrape_configs:
  - job_name: vhpcd
    static_configs: [{{targets: ["{ADDRESS}"]}}]
  - job_name: node
    metrics_path: /metrics.txt
    static_configs: [{{targets: ["{NODE_ADDRESS}"]}}]
"""


@pytest.fixture
def metrics(lab: Lab) -> Iterator[None]:
    """vhpcd and the health check of n1 have metrics."""
    toml = "/etc/vhpc/vhpc.toml"
    lab.run("n1", "mkdir", "-p", FOLDER)
    try:
        lab.run("n1", "cp", "-p", toml, f"{toml}.before")
        lab.run("n1", "sh", "-ec", f"cat >>{toml}", stdin=f'\n[host]\nmetrics_folder = "{FOLDER}"\n')
        with configured(lab, "ctl", "controller", f'metrics = "{ADDRESS}"'):
            lab.service("ctl", "restart", "vhpcd")
            yield
    finally:
        lab.service("ctl", "restart", "vhpcd")
        lab.run("n1", "sh", "-c", f"mv -f {toml}.before {toml}; rm -rf {FOLDER}")


def put(lab: Lab, name: str, text: str) -> None:
    lab.run("ctl", "sh", "-ec", f"mkdir -p {DATA}/web; cat >{DATA}/{name}", stdin=text)


@pytest.fixture
def prometheus(lab: Lab, metrics: None) -> Iterator[None]:
    """A Prometheus on vhpcd's host reads vhpcd's metrics, and those of n1 from a web server."""
    put(lab, "settings.yml", SETTINGS)
    put(lab, "vhpc.rules.yml", (CONTRIB / "prometheus/vhpc.rules.yml").read_text())
    commands = (
        f"prometheus --config.file={DATA}/settings.yml --storage.tsdb.path={DATA}/db"
        f" --web.listen-address={PROMETHEUS}",
        f"python3 -m http.server --bind 127.0.0.1 --directory {DATA}/web {NODE_ADDRESS.rpartition(':')[2]}",
    )
    pids = []
    try:
        for command in commands:
            start = f"exec setsid {command} >>{DATA}/log 2>&1 & echo $!"
            pids.append(lab.run("ctl", "sh", "-c", start).out.strip())
        until(lambda: answers(lab, 'up{job="vhpcd"} == 1'), "Prometheus to read vhpcd's metrics")
        yield
    finally:
        lab.run("ctl", "sh", "-c", f"kill {' '.join(pids)}; rm -rf {DATA}", check=False)


def asked(lab: Lab, path: str, query: str = "") -> Any:
    """The data of an answer of Prometheus; None while it does not answer."""
    done = lab.run("ctl", "python3", "-c", ASK, f"http://{PROMETHEUS}/api/v1/{path}", query, check=False)
    if done.code != 0:
        # it answers 503 while it starts
        assert "HTTP Error" not in done.err or "HTTP Error 503" in done.err, f"{query}: {done.err}"
        return None
    answer = json.loads(done.out)
    assert answer["status"] == "success", answer
    return answer["data"]


def answers(lab: Lab, query: str) -> list[Any]:
    """The time series that an expression gives now."""
    data = asked(lab, "query?query=", query)
    return data["result"] if data else []


def node_metrics(lab: Lab) -> str:
    """The file of n1's health check; Prometheus reads it soon."""
    lab.run("n1", "/usr/libexec/vhpc/healthcheck")
    text = lab.run("n1", "cat", f"{FOLDER}/vhpc.prom").out
    put(lab, "web/metrics.txt", text)
    return text


def test_the_alert_rules_are_valid(lab: Lab) -> None:
    rules = (CONTRIB / "prometheus/vhpc.rules.yml").read_text()
    said = lab.run("ctl", "sh", "-ec", "cat >/tmp/r.yml; promtool check rules /tmp/r.yml", stdin=rules).out
    assert "SUCCESS" in said


@pytest.mark.usefixtures("prometheus")
def test_a_job_is_seen_in_metrics_dashboard_and_rules(lab: Lab) -> None:
    job = lab.finish("true", "-w", "n1")
    assert job.accounted("State") == ["COMPLETED"]
    settled(lab)
    refused = lab.submit("true", "--vhpc-image=no-such-image")
    assert refused.wait("FAILED") == "FAILED"
    settled(lab)
    node = node_metrics(lab)
    seen = lab.run("ctl", "python3", "-c", GET, f"http://{ADDRESS}/metrics").out
    for text in (seen, node):
        checked = lab.run("ctl", "promtool", "check", "metrics", stdin=text, check=False)
        assert checked.code == 0, checked.err
    lines = set(seen.splitlines())
    assert 'vhpc_boots_total{result="ready"} 1.0' in lines
    assert 'vhpc_boots_total{result="ended"} 1.0' in lines, "the refused job"
    ends = [line for line in lines if line.startswith("vhpc_teardowns_total")]
    assert ends == ['vhpc_teardowns_total{result="clean"} 2.0'], f"both Epilogs, not {ends}"
    assert 'vhpc_lease_refusals_total{cause="image"} 1.0' in lines
    assert 'vhpc_stage_seconds_count{stage="agent"} 1.0' in lines
    assert "vhpc_nodes_drained 0.0" in lines
    assert "vhpc_devices_in_quarantine 0.0" in lines
    assert "vhpc_node_generations 0.0" in node.splitlines()
    panels_have_data(lab, "vhpc_fabric_audited_timestamp_seconds" in seen)
    groups = asked(lab, "rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert [(rule["name"], rule["lastError"]) for rule in rules if rule["health"] != "ok"] == []
    assert len(rules) > 10
    assert [rule["name"] for rule in rules if rule["state"] == "firing"] == []


def panels_have_data(lab: Lab, audited: bool) -> None:
    """Every query of the dashboard gives data, except about what has not happened."""
    dashboard = json.loads((CONTRIB / "grafana/vhpc.json").read_text())
    panels = [panel for panel in dashboard["panels"] if panel.get("targets")]
    assert len(panels) > 20
    for panel in panels:
        for target in panel["targets"]:
            query = target["expr"].replace("$__rate_interval", "1m")
            if panel["title"] in PANELS_OF_TROUBLE | (set() if audited else PANELS_OF_A_FABRIC):
                assert asked(lab, "query?query=", query) is not None
            else:
                until(partial(answers, lab, query), f"data of {panel['title']}: {query}", 60)


@pytest.mark.usefixtures("prometheus")
def test_a_node_that_vhpc_drains_is_an_alert(lab: Lab) -> None:
    for node, reason in (("n1", "vhpc: libvirtd does not answer"), ("n2", "a fan is broken")):
        lab.run("ctl", "scontrol", "update", f"NodeName={node}", "State=DRAIN", f"Reason={reason}")
    try:
        lab.service("ctl", "restart", "vhpcd")  # it asks Slurm at once, and then each minute
        until(lambda: answers(lab, "vhpc_nodes_drained == 1"), "the drained node to be counted")
        alert = 'ALERTS{alertname="VhpcNodesDrained"}'
        assert until(lambda: answers(lab, alert), "the alert")[0]["metric"]["alertstate"] == "pending"
    finally:
        for node in ("n1", "n2"):
            lab.resume(node)
