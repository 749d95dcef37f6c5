# SPDX-License-Identifier: Apache-2.0
"""Parsl on the login host, with workers in guests, which connect to it by nat."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import workflow_clients as flows
from cluster import NODES, Lab
from injection import until

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(3600)]

ADDRESS = "192.168.77.3"
"""network.nat_allow of the lab: an address of the login host."""


@pytest.fixture(autouse=True, scope="module")
def installed(lab: Lab) -> Iterator[None]:
    done = lab.run("n1", "passt", "--help", check=False)
    if "--vhost-user" not in done.out + done.err:
        pytest.skip(
            "nat needs passt 2024_11_27 or newer: use the lab of Debian 13 (lab/vlab up --suite trixie)"
        )
    flows.python_clients(lab)
    lab.run("login", "ip", "address", "replace", f"{ADDRESS}/32", "dev", "lo")
    for node in NODES:
        lab.run(node, "ip", "route", "replace", f"{ADDRESS}/32", "via", "10.77.0.3")
    yield
    for node in NODES:
        lab.run(node, "ip", "route", "del", f"{ADDRESS}/32", check=False)
    lab.run("login", "ip", "address", "del", f"{ADDRESS}/32", "dev", "lo", check=False)


def _start(lab: Lab, seconds: int) -> flows.Client:
    flows.workflow(lab, "parsl-flow", "parsl_count.py")
    script = f". ~/flows/bin/activate; cd ~/parsl-flow; exec python parsl_count.py {ADDRESS} {seconds}"
    return flows.Client(lab, script)


def test_parsl_runs_apps_in_guests(lab: Lab) -> None:
    """Parsl ends its blocks itself, with scancel."""
    client = _start(lab, 0)
    assert client.end() == 0, client.said()
    lab.quiet(300)
    lines = [line for line in client.said().splitlines() if not line.startswith("pid")]
    jobs = {int(line.split()[3]) for line in lines}
    # the worker of the first block may do both
    flows.lines_of(lab, "\n".join(lines), jobs=len(jobs))
    states = {state.split()[0] for state in flows.accounted(lab, "\n".join(lines))}
    assert states <= {"COMPLETED", "CANCELLED"}


def test_an_interrupted_parsl_leaves_no_guest(lab: Lab) -> None:
    """SIGINT for Parsl alone: if it also ends the interchange, as Ctrl-C in a terminal does, Parsl hangs."""
    client = _start(lab, 3000)
    until(lambda: len(flows.jobs_of_alice(lab, "RUNNING")) == 2, "blocks of Parsl", 300)
    client.interrupt(group=False)
    assert client.end(600) != 0, client.said()
    lab.quiet(300)
