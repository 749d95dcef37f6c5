# SPDX-License-Identifier: Apache-2.0
"""Whose an address is: a node's or the controller's, as Slurm and the configuration say.

munge says which user wrote a request, and not on which host.  A node's root may
speak for this node and no other, so what is said in a node's name has to come
from an address of it.

Slurm is asked, and names are resolved, in a thread; what is known is a value that
others read at any time.  It is kept in a file beside the database, since a vhpcd
that starts before slurmctld has running jobs all the same.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from ipaddress import IPv6Address, ip_address
from pathlib import Path

import msgspec

from vhpc_slurm.config import Controller
from vhpc_slurm.errors import UNDECODABLE, FabricError, NodeError
from vhpc_slurm.model import NODE_NAME
from vhpc_slurm.slurm.port import Slurm, SlurmNode

log = logging.getLogger("vhpcd")

Resolve = Callable[[str], frozenset[str]]

RESOLVE_S = 20.0
"""Names that are not resolved within so many seconds in all keep the addresses that they had."""
KEEP_S = 86400.0
"""So long a node is remembered that Slurm does not list any more: its jobs may not have ended."""


@dataclass(frozen=True)
class Known:
    """Addresses of nodes by Slurm's names of these, and of hosts that speak for the controller."""

    nodes: Mapping[str, frozenset[str]] = field(default_factory=dict)
    controllers: frozenset[str] = frozenset()

    @cached_property
    def every(self) -> frozenset[str]:
        """All of them: hosts of the cluster."""
        return self.controllers.union(*self.nodes.values())


def plain(address: str) -> str:
    """One way to write an address: IPv4 in IPv6 is IPv4, and there is no zone."""
    try:
        found = ip_address(address.partition("%")[0])
    except ValueError:
        return address
    mapped = found.ipv4_mapped if isinstance(found, IPv6Address) else None
    return str(mapped or found)


def resolve(name: str) -> frozenset[str]:
    """The addresses of a name, or the address that it is; none where nobody knows it."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return frozenset()
    return frozenset(plain(str(place[0])) for _, _, _, _, place in found)


class HostAddresses:
    """What is known, and how it is learnt; ``learn`` is for one thread at a time."""

    def __init__(
        self,
        settings: Controller,
        slurm: Slurm,
        *,
        resolve: Resolve = resolve,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin with what was known when vhpcd last ran; NodeError when the configuration makes no sense."""
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
                    "{node} has to stand in it for the name of a node",
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
                    # A name that nobody knows now may be one that the resolver cannot look up now.
                    in_time = self._clock() - now < RESOLVE_S
                    found = self._resolve(name) if in_time else frozenset()
                    resolved[name] = found or self._names.get(name, frozenset())
            return frozenset().union(*(resolved[name] for name in names))

        listed = {one.name: addresses(self._names_of(one)) for one in nodes}
        hosts = addresses((*controllers, *self._controllers))
        self._listed |= dict.fromkeys(listed, now)
        self._listed = {name: seen for name, seen in self._listed.items() if now - seen < KEEP_S}
        gone = {name: known for name, known in self.known.nodes.items() if name in self._listed}
        known = Known(gone | listed, hosts)
        self._names = resolved
        if known != self.known:
            log.info("%d nodes and %d addresses of hosts are known", len(known.nodes), len(known.every))
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
            log.warning("%s cannot be read, Slurm is asked: %s", self._file, err)
            return
        self.known = Known(kept.nodes, kept.controllers)

    def _remember(self) -> None:
        new = self._file.with_name(f".{self._file.name}.new")
        try:
            new.unlink(missing_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with os.fdopen(os.open(new, flags, 0o600), "wb") as opened:
                opened.write(msgspec.json.encode(_Kept(dict(self.known.nodes), self.known.controllers)))
            new.replace(self._file)
        except OSError as err:
            log.warning("%s cannot be written: %s", self._file, err)
            with contextlib.suppress(OSError):
                new.unlink(missing_ok=True)


class _Kept(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    nodes: dict[str, frozenset[str]]
    controllers: frozenset[str]


def _pairs(words: Iterable[str]) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for word in words:
        node, equals, address = word.partition("=")
        if not (equals and address.strip() and NODE_NAME.match(node.strip())):
            raise NodeError(f"controller.node_addresses has {word[:80]!r}", "NODE=ADDRESS is expected")
        found[node.strip()] = (*found.get(node.strip(), ()), address.strip())
    return found
