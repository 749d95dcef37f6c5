# SPDX-License-Identifier: Apache-2.0
"""Which addresses belong to which node or to the controller, by Slurm and the configuration.

MUNGE authenticates the user of a request, not its host. Root of a node may send
requests for that node only, so a request in the name of a node has to come from one of
the node's addresses.

A thread asks Slurm and resolves names; its result is an immutable value that others
read at any time. A file next to the database keeps it, because a vhpcd that
starts before slurmctld has running jobs too.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from ipaddress import IPv6Address, ip_address
from pathlib import Path

import msgspec

from vhpc_slurm.config.controller import Controller
from vhpc_slurm.errors import FabricError, NodeError
from vhpc_slurm.model import NODE_NAME
from vhpc_slurm.slurm.port import Slurm, SlurmNode
from vhpc_slurm.undecodable import UNDECODABLE

log = logging.getLogger("vhpcd")

Resolve = Callable[[str], frozenset[str]]

RESOLVE_S = 20.0
"""Seconds for resolving all names; names that are not resolved by then keep their last addresses."""
KEEP_S = 86400.0
"""Seconds that a node is kept which Slurm no longer lists: its jobs may not have ended."""


@dataclass(frozen=True)
class Known:
    """Addresses of nodes, by their names in Slurm, and of hosts that may send the controller's requests."""

    nodes: Mapping[str, frozenset[str]] = field(default_factory=dict)
    controllers: frozenset[str] = frozenset()
    underlay: Mapping[str, str] = field(default_factory=dict)
    """The one address of each node that job networks use."""

    @cached_property
    def every(self) -> frozenset[str]:
        """All addresses of hosts of the cluster."""
        return self.controllers.union(*self.nodes.values())


@lru_cache(maxsize=4096)
def plain(address: str) -> str:
    """The canonical form of an address: IPv4-mapped IPv6 becomes IPv4, a zone is removed.

    Each connection asks for its two ends, and the same nodes come again.
    """
    try:
        found = ip_address(address.partition("%")[0])
    except ValueError:
        return address
    mapped = found.ipv4_mapped if isinstance(found, IPv6Address) else None
    return str(mapped or found)


def resolve(name: str) -> frozenset[str]:
    """The addresses of a host name or of an address itself; empty where it cannot be resolved."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return frozenset()
    return frozenset(plain(str(place[0])) for _, _, _, _, place in found)


def underlay_address(addresses: Iterable[str]) -> str:
    """The address that other nodes can send to: IPv4 first, then the lowest; empty without such an address.

    The choice does not depend on the resolver's order, so vhpcd chooses the same one every time.
    """
    usable = []
    for address in addresses:
        try:
            found = ip_address(address)
        except ValueError:
            continue
        if not (found.is_loopback or found.is_link_local or found.is_multicast or found.is_unspecified):
            usable.append((found.version, int(found), str(found)))
    return min(usable)[2] if usable else ""


class HostAddresses:
    """The known addresses; ``learn`` updates them, in one thread at a time."""

    def __init__(
        self,
        settings: Controller,
        slurm: Slurm,
        *,
        underlay: str = "",
        resolve: Resolve = resolve,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin with the addresses of vhpcd's last run; NodeError when the configuration is invalid.

        ``underlay`` is the pattern of network.underlay.
        """
        self._underlay = underlay
        self.known = Known()
        self._slurm = slurm
        self._resolve = resolve
        self._patterns = settings.node_names
        self._extra = _pairs(settings.node_addresses)
        self._controllers = settings.controller_addresses
        self._names: dict[str, frozenset[str]] = {}
        self._clock = clock
        self._listed: dict[str, float] = {}
        self._file = Path(settings.database).with_name("addresses.json")
        for pattern in settings.node_names:
            if "{node}" not in pattern or "{" in pattern.replace("{node}", ""):
                raise NodeError(
                    f"controller.node_names has {pattern!r}",
                    "it must contain {node} and no other name in braces",
                )
        self._recall()

    def learn(self) -> None:
        """Ask Slurm and resolve names; FabricError when Slurm cannot be asked, and then nothing changes."""
        nodes, controllers = self._slurm.nodes(), self._slurm.controllers()
        if not nodes:
            raise FabricError(
                "Slurm shows vhpcd no nodes",
                "sinfo printed none",
                "PrivateData=nodes of slurm.conf hides them from all but operators",
            )
        now = self._clock()
        resolved: dict[str, frozenset[str]] = {}

        def addresses(names: Iterable[str]) -> frozenset[str]:
            for name in names:
                if name not in resolved:
                    # The resolver may be down: a name that cannot be resolved keeps its addresses.
                    in_time = self._clock() - now < RESOLVE_S
                    found = self._resolve(name) if in_time else frozenset()
                    resolved[name] = found or self._names.get(name, frozenset())
            return frozenset().union(*(resolved[name] for name in names))

        listed = {one.name: addresses(self._names_of(one)) for one in nodes}
        hosts = addresses((*controllers, *self._controllers))
        sought = {one.name: self._underlay.replace("{node}", one.name) or one.address for one in nodes}
        underlay = {node: underlay_address(addresses((name,))) for node, name in sought.items()}
        self._listed |= dict.fromkeys(listed, now)
        self._listed = {name: seen for name, seen in self._listed.items() if now - seen < KEEP_S}
        gone = {name: known for name, known in self.known.nodes.items() if name in self._listed}
        known = Known(gone | listed, hosts, {node: address for node, address in underlay.items() if address})
        self._names = resolved
        if known != self.known:
            log.info("vhpcd knows %d nodes and %d addresses of hosts", len(known.nodes), len(known.every))
            self.known = known
            self._remember()

    def _names_of(self, node: SlurmNode) -> tuple[str, ...]:
        patterns = (pattern.replace("{node}", node.name) for pattern in self._patterns)
        return (node.address, node.hostname, *patterns, *self._extra.get(node.name, ()))

    def _recall(self) -> None:
        try:
            kept = msgspec.json.decode(self._file.read_bytes(), type=_Kept)
        except FileNotFoundError:
            return
        except (OSError, *UNDECODABLE) as err:
            log.warning("%s cannot be read; vhpcd asks Slurm instead: %s", self._file, err)
            return
        self.known = Known(kept.nodes, kept.controllers, kept.underlay)

    def _remember(self) -> None:
        new = self._file.with_name(f".{self._file.name}.new")
        try:
            new.unlink(missing_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with os.fdopen(os.open(new, flags, 0o600), "wb") as opened:
                known = self.known
                kept = _Kept(dict(known.nodes), known.controllers, dict(known.underlay))
                opened.write(msgspec.json.encode(kept))
            new.replace(self._file)
        except OSError as err:
            log.warning("%s cannot be written: %s", self._file, err)
            with contextlib.suppress(OSError):
                new.unlink(missing_ok=True)


class _Kept(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    nodes: dict[str, frozenset[str]]
    controllers: frozenset[str]
    underlay: dict[str, str] = {}


def _pairs(words: Iterable[str]) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for word in words:
        node, equals, address = word.partition("=")
        if not (equals and address.strip() and NODE_NAME.match(node.strip())):
            raise NodeError(f"controller.node_addresses has {word[:80]!r}", "NODE=ADDRESS is expected")
        found[node.strip()] = (*found.get(node.strip(), ()), address.strip())
    return found
