# SPDX-License-Identifier: Apache-2.0
"""Rules of others for routed packets: br_netfilter sends the frames of bridges through them too.

With net.bridge.bridge-nf-call-iptables (Docker and Kubernetes switch it on) a frame
between two guests passes the chains with hook forward of the families ip, ip6 and inet.
Docker's has the policy drop.  Several chains of one hook all have to accept a packet, so a
rule in a table of ours cannot help, and the bridge's own switch (nf_call_iptables) can only
add frames, not spare them.  What helps is a rule at the beginning of each such chain, as
libvirt and Docker put theirs there: frames from a bridge of ours to the same bridge are
accepted.  The node routes nothing to or from these bridges, which have no address.

The rule is one for all jobs, and stays, as the node's own table does (``firewall``); it is
made again with each segment and by the health check, since programs write their chains anew.
Chains of iptables-legacy are not in nftables: ``vhpc doctor`` says so.

Sources: net/bridge/br_netfilter_hooks.c (br_nf_pre_routing, br_nf_forward); nft(8), iptables(8).
"""
# Decision: A rule in other programs' chains

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from vhpc_slurm.node.network import tools
from vhpc_slurm.node.network.plan import PREFIX

SWITCHES = {"ip": "bridge-nf-call-iptables", "ip6": "bridge-nf-call-ip6tables"}
"""Families of nftables, and the sysctl below net.bridge that sends frames through their chains."""
LEGACY = Path("/proc/net/ip_tables_names")
COMMENT = "vhpc: frames of job networks"
_OURS = "vhpc"
_CHAIN = re.compile(r"type filter hook forward priority [^;]*; policy ([a-z]+);")
_DROPS = re.compile(r"\b(drop|reject)\b")


@dataclass(frozen=True)
class Chain:
    """A chain of another program that frames between guests pass.

    ``drops``: its policy or one of its rules drops packets; ``accepts``: it has our rule.
    """

    family: str
    table: str
    name: str
    drops: bool
    accepts: bool

    def __str__(self) -> str:
        return f"{self.family} {self.table} {self.name}"


def switched_on(folder: Path | None = None) -> tuple[str, ...]:
    """Families whose chains get the frames of bridges, in this thread's network namespace."""
    folder = folder or tools.SYSCTL / "bridge"
    found = []
    for family, name in SWITCHES.items():
        try:
            if (folder / name).read_text().strip() != "0":
                found.append(family)
        except OSError:
            continue  # br_netfilter is not loaded
    return tuple(found)


def chains(families: tuple[str, ...]) -> tuple[Chain, ...]:
    """Chains of others that frames pass, if br_netfilter is on for these families.

    From the text, for the reason of ``tools.tables``.

    Raises:
        NodeError: nftables cannot be asked.
    """
    if not families or tools.find("nft") is None:
        return ()
    wanted = {*families, "inet"}
    found: list[Chain] = []
    for family, table, name, policy in _forward_chains(tools.run("nft", "list", "chains")):
        if family not in wanted or table.startswith(_OURS):
            continue
        rules = tools.run("nft", "list", "chain", family, table, name)
        # a jump may lead to a rule that drops
        drops = policy == "drop" or bool(_DROPS.search(_rules(rules))) or "jump " in rules or "goto " in rules
        found.append(Chain(family, table, name, drops, COMMENT in rules))
    return tuple(found)


def accept() -> None:
    """Let frames between guests pass the chains of others, as far as br_netfilter sends them there.

    Raises:
        NodeError: nftables refuses; chains before the one that fails are done.
    """
    for chain in chains(switched_on()):
        if chain.drops and not chain.accepts:
            tools.run("nft", "-f", "-", data=_rule(chain))


def lacking() -> tuple[Chain, ...]:
    """Chains that may drop frames between guests and do not have our rule.

    Raises:
        NodeError: nftables cannot be asked.
    """
    return tuple(one for one in chains(switched_on()) if one.drops and not one.accepts)


def legacy() -> bool:
    """Whether this kernel has tables of iptables-legacy, which nftables does not show."""
    try:
        return bool(LEGACY.read_text().split())
    except OSError:
        return False


def _rule(chain: Chain) -> str:
    ours = f'"{PREFIX}b*"'
    return f'insert rule {chain} iifname {ours} oifname {ours} counter accept comment "{COMMENT}"\n'


def _rules(text: str) -> str:
    """The lines of a chain without that of its hook and policy."""
    return "\n".join(line for line in text.splitlines() if "hook forward" not in line)


def _forward_chains(text: str) -> list[tuple[str, str, str, str]]:
    """Family, table, name and policy of each filter chain of hook forward, from ``nft list chains``."""
    found, table, name = [], ("", ""), ""
    for words in (line.split() for line in text.splitlines()):
        if words[:1] == ["table"] and len(words) >= 3:
            table = (words[1], words[2])
        elif words[:1] == ["chain"] and len(words) >= 2:
            name = words[1]
        elif match := _CHAIN.match(" ".join(words)):
            found.append((*table, name, match[1]))
    return found
