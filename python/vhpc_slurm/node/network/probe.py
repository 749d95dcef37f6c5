# SPDX-License-Identifier: Apache-2.0
"""Whether this node's kernel has what job networks and nat need: tested in a separate network namespace.

``vhpc doctor`` runs this module in a new process below ``unshare --net``, so that nothing
of it is in the node's own namespace, and nothing is left when the process has ended.
"""

from __future__ import annotations

import base64
import os
import subprocess
import sys

from vhpc_slurm.errors import NodeError
from vhpc_slurm.model import (
    Generation,
    GuestInterface,
    NodeSegment,
    SiteInterface,
    SitePort,
    Tunnel,
    TunnelKeys,
)
from vhpc_slurm.node.host import process
from vhpc_slurm.node.network import firewall, nat, plan, segment, site, tools, tunnel

TIMEOUT_S = 30.0
_GENERATION = Generation(1, 0, "00000000")
_VNI, _MTU = 1, 1450
_GID = 1


def run(what: str = "job") -> None:
    """Make something in a new namespace.

    ``job``: a segment; ``wireguard``: an encrypted one; ``nat``: passt's filter; ``site``: a bridge's port.

    Raises:
        NodeError: the kernel or a program lacks something; its line says what.
    """
    unshare = tools.find("unshare")
    if unshare is None:
        raise NodeError("unshare is not installed", "", "apt install util-linux")
    command = [unshare, "--net", sys.executable, "-m", "vhpc_slurm.node.network.probe", what]
    try:
        done = subprocess.run(command, capture_output=True, timeout=TIMEOUT_S, text=True, check=False)
    except (OSError, subprocess.TimeoutExpired) as err:
        raise NodeError("cannot make a test in a network namespace", str(err)) from err
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()
        raise NodeError(said[-1][:300] if said else f"unshare ended with status {done.returncode}")


def _try(what: str) -> None:
    if what == "nat":
        rules = nat.Rules(("192.0.2.1",), ("192.0.2.2/32",), ("192.0.2.0/24",), 7634)
        nat.protect(_GENERATION, 0, _GID, rules)
        process.end(nat.hold(_GENERATION, 0, _GID, rules))
        return
    if what == "site":
        tools.batch(
            "ip", (("link", "add", "name", "br0", "type", "bridge"), ("link", "set", "dev", "br0", "up"))
        )
        port = SitePort(site.tap_name(0), "0a:76:c0:00:02:02", "192.0.2.2/24", 1500)
        process.end(site.make(_GENERATION, 0, SiteInterface("br0", 2, "192.0.2.1"), port, isolated=True))
        return
    taps = [GuestInterface(plan.tap_name(_VNI, 0), plan.mac(_VNI, 0), 2, "192.0.2.1/24", "2001:db8::1/64")]
    through, peer = None, "192.0.2.2"
    if what == "wireguard":
        through = Tunnel(plan.tunnel_name(_VNI), 20480, plan.tunnel_address(_VNI, 0))
        private, public = (base64.b64encode(os.urandom(32)).decode() for _ in range(2))
        around = [tunnel.Peer(public, peer, plan.tunnel_address(_VNI, 1))]
        peer = around[0].address
        tunnel.make(_GENERATION, through, TunnelKeys(private, (public,)), around, _MTU)
    node = NodeSegment(_VNI, 7634, "192.0.2.1", plan.bridge_name(_VNI), plan.vxlan_name(_VNI), through)
    segment.make_devices(_GENERATION, node, taps, _MTU)
    if firewall.available():
        process.end(firewall.replace(_GENERATION, node, (peer,)))


if __name__ == "__main__":
    try:
        _try(sys.argv[1])
    except NodeError as err:
        print(err.line(), file=sys.stderr)
        sys.exit(1)
