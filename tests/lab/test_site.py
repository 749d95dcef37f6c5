# SPDX-License-Identifier: Apache-2.0
"""Guests on a bridge of the site: a peer behind it answers, what they must not send does not arrive."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest
from cluster import NODES, VLAB, Lab
from injection import said, settled, until

pytestmark = pytest.mark.lab

PEER, NODE = "198.51.100.200", "198.51.100.11"
SETTINGS = f"""
s/^allowed = .*/allowed = ["none", "job", "nat", "site"]/
/^nat_dns/a site_bridge = "br-site"
/^nat_dns/a site_ipv4 = "198.51.100.0/24"
/^nat_dns/a site_gateway = "{PEER}"
"""
"""For sed, in the table [network] of the lab's configuration."""
BRIDGE = f"""
ip link add br-site address 02:00:00:00:00:01 type bridge
ip address add {NODE}/24 dev br-site
ip netns add peer
ip link add to-peer type veth peer name eth0 netns peer
ip link set to-peer master br-site up
ip -n peer link set lo up
ip -n peer address add {PEER}/24 dev eth0
ip -n peer address add 203.0.113.200/32 dev lo
ip -n peer link set eth0 up
ip link set br-site up
printf '198.51.100.2%s n1-guest%s\\n' 0 0 1 1 >>/etc/hosts
"""
REMOVE = "ip netns del peer; ip link del to-peer; ip link del br-site; sed -i /guest/d /etc/hosts"
STATE = "ip -o link show br-site; ip -o -4 address show br-site; bridge link show | grep br-site"


@pytest.fixture(scope="module")
def site(lab: Lab) -> Iterator[None]:
    """n1 has a bridge, and a peer on it in a network namespace of its own; the site allows it."""
    for host in ("ctl", *NODES):
        lab.run(host, "sed", "-i", SETTINGS.strip(), "/etc/vhpc/vhpc.toml")
    lab.service("ctl", "restart", "vhpcd")
    lab.run("n1", "sh", "-ec", BRIDGE)
    yield
    lab.run("n1", "sh", "-c", REMOVE, check=False)
    subprocess.run([VLAB, "up"], check=True, capture_output=True, timeout=120)


TRY = """
reach() {
    ping -c1 -W${seconds:-20} $2 $3 $4 >/dev/null 2>&1 && found=yes || found=no
    echo "$(hostname) $1: $found"
}
reach peer %(peer)s
reach 'behind the gateway' 203.0.113.200
[ $(hostname) = n1-g0 ] && other=198.51.100.21 || other=198.51.100.20
(seconds=5; reach node %(node)s)
(seconds=5; reach 'guest of the node' $other)
[ $(hostname) = n1-g0 ] && name=n1-g1 || name=n1-g0
reach 'guest by the job network' $name
sudo ip address add 198.51.100.77/24 dev site0
(seconds=5; reach 'peer from another address' -I 198.51.100.77 %(peer)s)
own=$(cat /sys/class/net/site0/address)
set -- $(ip -4 -o address show dev site0)
echo $(hostname) has $own $4
sudo ip link set dev site0 address 02:00:00:00:00:99
sudo ip route replace default via %(peer)s
(seconds=5; reach 'peer from another MAC' %(peer)s)
sudo ip link set dev site0 address $own
reach 'peer again' %(peer)s
"""


@pytest.mark.promise("site.reach", "site.release", "attack.site-address")
def test_guests_reach_the_sites_network_with_their_own_address(lab: Lab, site: None) -> None:
    before = lab.run("n1", "sh", "-c", STATE).out
    script = TRY % {"peer": PEER, "node": NODE}
    job = lab.finish(
        f"cat > ~/try.sh <<'END'\n{script}END\nsrun -n2 sh ~/try.sh\n",
        *("-w", "n1", "-n2", "--vhpc-guests-per-node=2", "--vhpc-network=job,site", "--chdir=/home/alice"),
    )
    expected = []
    for guest, number in (("n1-g0", 20), ("n1-g1", 21)):
        expected += [
            f"{guest} peer: yes",
            f"{guest} behind the gateway: yes",
            f"{guest} node: no",
            f"{guest} guest of the node: no",
            f"{guest} guest by the job network: yes",
            f"{guest} peer from another address: no",
            f"{guest} has 0a:76:c6:33:64:{number:02x} 198.51.100.{number}/24",
            f"{guest} peer from another MAC: no",
            f"{guest} peer again: yes",
        ]
    assert sorted(job.output().splitlines()) == sorted(expected)
    settled(lab)
    assert lab.run("n1", "sh", "-c", STATE).out == before, "the bridge is as it was"
    assert "vhpcs" not in lab.run("n1", "sh", "-c", "ip -o link; nft list tables").out
    lab.assert_clean()


@pytest.mark.promise("site.missing")
def test_a_missing_bridge_is_named_and_drains_the_node(lab: Lab, site: None) -> None:
    """n2 has no such bridge: its Prolog says so, and so does the doctor."""
    found = {one["check"]: one for one in lab.vhpc("n2", "doctor", check=False)}
    assert "this node has no bridge br-site" in found["site.bridge"]["what"]
    assert found["site.kernel"]["level"] == "ok"
    job = lab.submit("echo up", "-w", "n2", "--vhpc-network=site")
    until(lambda: "DRAIN" in lab.node_state("n2")[0], "the node to be drained")
    assert "this node has no bridge br-site" in lab.node_state("n2")[1], lab.node_state("n2")
    lab.run("ctl", "scancel", str(job.id))
    job.wait()
    assert "up" not in said(lab, job)
    lab.quiet()
    lab.resume("n2")
