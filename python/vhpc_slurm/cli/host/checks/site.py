# SPDX-License-Identifier: Apache-2.0
"""Needs of the site's network for guests on a compute node: the bridge, the names, the packet filter."""

from __future__ import annotations

from collections.abc import Iterator

from vhpc_slurm.cli.host.checks import CheckResult, error, ok, warn
from vhpc_slurm.config import Config
from vhpc_slurm.errors import NodeError
from vhpc_slurm.node.network import firewall, probe, site


def check(config: Config, node: str, *, root: bool) -> Iterator[CheckResult]:
    """Results where the site allows its bridge; the kernel is tried by root only."""
    network = config.network
    if "site" not in network.allowed:
        return
    try:
        mtu = site.bridge_mtu(network.site_bridge)
    except NodeError as err:
        what = f"{err.line()}: jobs with --vhpc-network=site fail here, and drain this node"
        yield error("site.bridge", what, err.hint)
    else:
        yield ok("site.bridge", f"{network.site_bridge} is up and has an MTU of {mtu}")
    try:
        first, last = (site.address(network, node, slot) for slot in (0, network.site_guests - 1))
    except NodeError as err:
        yield error("site.names", err.line(), err.hint)
    else:
        yield ok("site.names", f"guests of this node have addresses such as {first} and {last}")
    if not firewall.available():
        what = "nftables is not installed: jobs with --vhpc-network=site fail here, and drain this node"
        yield error("site.firewall", what, "apt install nftables")
    elif not root:
        yield warn("site.kernel", "a locked bridge port was not tried", "run vhpc doctor as root")
    else:
        yield kernel()


def kernel() -> CheckResult:
    """Whether the kernel makes locked bridge ports and the packet filter."""
    try:
        probe.run("site")
    except NodeError as err:
        what = f"this node cannot make a guest's port on a bridge: {err.line()}"
        return error(
            "site.kernel", what, "it needs Linux 5.18 with bridge, tun and nf_tables, and iproute2 5.18"
        )
    return ok("site.kernel", "a locked port was created in a separate namespace, and removed")
