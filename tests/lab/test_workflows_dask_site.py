# SPDX-License-Identifier: Apache-2.0
"""dask-jobqueue's SLURMCluster: scheduler on the login host, workers in jobs on a bridge of the site."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest
import workflow_clients as flows
from cluster import NODES, VLAB, Lab

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(3600)]

LOGIN = "198.51.100.200"
SETTINGS = f"""
s/^allowed = .*/allowed = ["none", "job", "nat", "site"]/
/^nat_dns/a site_bridge = "br-site"
/^nat_dns/a site_ipv4 = "198.51.100.0/24"
/^nat_dns/a site_gateway = "{LOGIN}"
/^nat_dns/a site_isolated = false
"""
"""For sed, in the table [network] of the lab's configuration. Workers of one node talk to each other."""
UNDERLAY = {"login": "10.77.0.3", "n1": "10.77.0.11", "n2": "10.77.0.12"}


def _join(lab: Lab, host: str) -> None:
    """The host has an interface on the site's network; in place of a VLAN, which not every kernel has."""
    others = [address for name, address in UNDERLAY.items() if name != host]
    lines = [
        f"ip link add to-site type vxlan id 77 dstport 8472 local {UNDERLAY[host]}",
        *(f"bridge fdb append 00:00:00:00:00:00 dev to-site dst {address}" for address in others),
        "ip link set to-site up",
    ]
    lab.run(host, "sh", "-ec", "\n".join(lines))


@pytest.fixture(scope="module", autouse=True)
def site(lab: Lab) -> Iterator[None]:
    """A network of the site, on which the login host is, and a bridge of each node."""
    flows.python_clients(lab)
    for host in ("ctl", *NODES):
        lab.run(host, "sed", "-i", SETTINGS.strip(), "/etc/vhpc/vhpc.toml")
    lab.service("ctl", "restart", "vhpcd")
    for host in UNDERLAY:
        _join(lab, host)
    lab.run("login", "ip", "address", "add", f"{LOGIN}/24", "dev", "to-site")
    for number, node in enumerate(NODES, 1):
        bridge = f"ip link add br-site address 02:00:00:00:00:0{number} type bridge; ip link set br-site up"
        names = f"printf '198.51.100.{number}%s {node}-guest%s\\n' 0 0 1 1 >>/etc/hosts"
        lab.run(node, "sh", "-ec", f"{bridge}; ip link set to-site master br-site; {names}")
    yield
    for host in UNDERLAY:
        remove = "ip link del to-site; ip link del br-site; sed -i /-guest[01]/d /etc/hosts"
        lab.run(host, "sh", "-c", remove, check=False)
    subprocess.run([VLAB, "up"], check=True, capture_output=True, timeout=120)


def test_each_worker_is_a_job_in_a_guest(lab: Lab) -> None:
    flows.workflow(lab, "dask-cluster", "dask_cluster.py")
    client = flows.Client(lab, f"cd ~/dask-cluster; exec ~/flows/bin/python dask_cluster.py {LOGIN}")
    assert client.end() == 0, client.said()
    lines = client.said().splitlines()
    assert f"total {sum(map(int, flows.COUNTS))}" in lines, client.said()
    flows.lines_of(lab, "\n".join(line for line in lines if "debian-minimal:" in line))
    lab.quiet(300)
