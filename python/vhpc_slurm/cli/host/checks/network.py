# SPDX-License-Identifier: Apache-2.0
"""Needs of job networks on a compute node."""

from __future__ import annotations

from collections.abc import Iterator

from vhpc_slurm.cli.host.checks import CheckResult, error, ok, warn
from vhpc_slurm.config import Config
from vhpc_slurm.controller.api.addresses import resolve, underlay_address
from vhpc_slurm.errors import NodeError
from vhpc_slurm.model import NodeSegment, Tunnel
from vhpc_slurm.node.network import firewall, forwarding, plan, probe, segment


def check(config: Config, node: str, *, root: bool) -> Iterator[CheckResult]:
    """Results where the site allows job networks; the kernel is tried by root only."""
    network = config.network
    if "job" not in network.allowed:
        return
    if not firewall.available():
        if network.trusted_underlay:
            yield warn(
                "network.firewall",
                "nftables is not installed: any host or user that can send UDP to this node can send frames "
                "to guests, and guests may reach this node's own addresses",
                "apt install nftables",
            )
        else:
            yield error(
                "network.firewall",
                "nftables is not installed: jobs with --vhpc-network=job fail here, and drain this node",
                "apt install nftables",
            )
    if root:
        yield kernel()
        if network.encryption == "wireguard":
            yield wireguard()
    else:
        yield warn("network.kernel", "job networks were not tried", "run vhpc doctor as root")
    yield bridge_netfilter(network.accept_bridged)
    yield underlay(config, node)


def kernel() -> CheckResult:
    """Whether the kernel makes locked bridge ports, VXLAN, multiqueue taps and the firewall."""
    try:
        probe.run()
    except NodeError as err:
        return error(
            "network.kernel",
            f"this node cannot make a job network: {err.line()}",
            "it needs Linux 5.18 with bridge, vxlan, tun and nf_tables, and iproute2 5.18 and nftables",
        )
    return ok("network.kernel", "a test network was created in a separate namespace, and removed")


def wireguard() -> CheckResult:
    """Whether kernel and tools make an encrypted job network."""
    try:
        probe.run("wireguard")
    except NodeError as err:
        return error(
            "network.wireguard",
            f"network.encryption is wireguard, and this node cannot make such a network: {err.line()}",
            "it needs a kernel with wireguard, and wireguard-tools",
        )
    return ok(
        "network.wireguard", "an encrypted test network was created in a separate namespace, and removed"
    )


def bridge_netfilter(accepts: bool) -> CheckResult:
    """Whether rules of others for routed packets drop frames between guests, and which.

    ``accepts``: nodes put a rule of vhpc into these chains (``network.accept_bridged``).
    """
    name = "network.br_netfilter"
    families = forwarding.switched_on()
    if not families:
        return ok(name, "bridged frames do not pass the rules for routed packets")
    sysctls = [f"net.bridge.{forwarding.SWITCHES[family]}" for family in families]
    hint, first = f"sysctl -w {' '.join(f'{one}=0' for one in sysctls)}; or accept ", sysctls[0]
    if forwarding.legacy():
        what = f"{first} is on, and this node has rules of iptables-legacy, which may drop frames of guests"
        ours = f"-i {plan.PREFIX}b+ -o {plan.PREFIX}b+"
        return warn(name, what, f"{hint}{ours} at the beginning of FORWARD there")
    try:
        dropping = [one for one in forwarding.chains(families) if one.drops]
    except NodeError as err:
        return warn(name, f"{first} is on: {err.line()}", f"sysctl -w {first}=0")
    lacking = ", ".join(str(one) for one in dropping if not one.accepts)
    if lacking and not accepts:
        what = f"{first} is on, and a chain that may drop packets cuts job networks: {lacking}"
        ours = f'iifname "{plan.PREFIX}b*" oifname "{plan.PREFIX}b*"'
        return warn(name, what, f"{hint}{ours} at its beginning; or set network.accept_bridged")
    what = "no chain of others with hook forward drops packets"
    if lacking:
        what = f"the next job network puts a rule that accepts its frames into: {lacking}"
    elif dropping:
        what = f"a rule of vhpc accepts frames between guests in: {', '.join(map(str, dropping))}"
    return ok(name, f"{first} is on; {what}")


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
