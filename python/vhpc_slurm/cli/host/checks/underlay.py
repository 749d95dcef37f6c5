# SPDX-License-Identifier: Apache-2.0
"""The underlay address of a compute node for job networks, as vhpcd's resolver gives it."""

from __future__ import annotations

from collections.abc import Iterator

from vhpc_slurm.cli.host.checks import CheckResult, error, ok, warn
from vhpc_slurm.config import Config
from vhpc_slurm.controller.api.addresses import resolve, underlay_address
from vhpc_slurm.errors import NodeError
from vhpc_slurm.model import NodeSegment, Tunnel
from vhpc_slurm.node.network import plan, segment


def check(config: Config, node: str) -> Iterator[CheckResult]:
    """The result where the site allows job networks."""
    if "job" in config.network.allowed:
        yield underlay(config, node)


def underlay(config: Config, node: str) -> CheckResult:
    """The MTU that this node's underlay interface leaves, by the name that resolves to its address."""
    network = config.network
    name = network.underlay.replace("{node}", node) or node
    address = underlay_address(resolve(name))
    if not address:
        hint = "vhpcd resolves it elsewhere; see network.underlay in vhpc.toml(5)"
        return warn("network.underlay", f"{name} resolves to no usable address on this host", hint)
    vni, tunnel = network.vni_first, None
    if network.encryption == "wireguard":
        tunnel = Tunnel(plan.tunnel_name(vni), network.tunnel_port(vni), plan.tunnel_address(vni, 0))
    try:
        mtu = segment.underlay_mtu(
            NodeSegment(vni, network.port, address, plan.bridge_name(vni), plan.vxlan_name(vni), tunnel)
        )
    except NodeError as err:
        return error("network.underlay", err.line(), "see network.underlay in vhpc.toml(5)")
    if network.mtu > mtu:
        what = f"network.mtu is {network.mtu}, and {address} leaves {mtu}"
        return error("network.underlay", what, "set network.mtu to the least that the nodes leave")
    return ok("network.underlay", f"{address} leaves guests an MTU of {mtu}")
