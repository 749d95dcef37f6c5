# SPDX-License-Identifier: Apache-2.0
"""Which host may send which request: a node for itself, the controller for jobs and for the fabric.

Any host with a credential of root or SlurmUser may send requests that only read (one
lease, lists, the status): leases contain no secrets. Other users may read about their own jobs, and save
them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from vhpc_slurm.controller.api import checkpoint_messages, cluster_messages, status_messages, usage_messages
from vhpc_slurm.controller.api import protocol as wire
from vhpc_slurm.controller.api.addresses import HostAddresses
from vhpc_slurm.errors import FabricError, VhpcError

log = logging.getLogger("vhpcd")

LEARN_S = 300.0
"""Seconds between two queries of Slurm for the addresses of its hosts."""
AGAIN_S = 10.0
"""Seconds until the next query after one that failed."""
WAIT_S = 6.0
"""Seconds that a request waits for such a query; a later result serves the next request."""
SOON_S = 1.0
"""An unknown address causes a query at once, but not more often than this, in seconds."""


@dataclass(frozen=True)
class Origin:
    """Where a request came from: the address of the other end, and whether that is this host."""

    address: str
    own_host: bool


def speaker(request: wire.Request) -> str | None:
    """The node in whose name a request is sent; empty: the controller; None: the request only reads."""
    match request:
        case wire.GetLease():
            return request.node if request.wait_s > 0 or request.stage else None
        case (
            wire.Acknowledge()
            | wire.ReportReady()
            | usage_messages.ReportUsage()
            | usage_messages.ReportUsageSoFar()
            | status_messages.ReportQuarantine()
            | checkpoint_messages.AskOrder()
            | cluster_messages.AskRoster()
        ):
            return request.node
        case wire.ReportTimeline():
            return request.timeline.node
        case wire.OpenGeneration() | wire.WithoutGuests() | wire.Ending():
            return ""
        case wire.Fence() | wire.ClearKey() | wire.TellFabric():
            return ""
    return None


class Authority:
    """Belongs to the event loop; Slurm is asked in a thread of its own."""

    def __init__(self, addresses: HostAddresses, clock: Callable[[], float] = time.monotonic) -> None:
        self._addresses = addresses
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, "addresses")
        self._asked = float("-inf")
        self._learning: asyncio.Future[None] | None = None
        self._trouble = ""

    def knows(self, address: str) -> bool:
        """Whether an address is one of a host of the cluster."""
        return address in self._addresses.known.every

    def speaks_for(self, origin: Origin) -> tuple[str, ...]:
        """The nodes whose requests may come from there, in the form of ``Status``."""
        if origin.own_host:
            return (wire.ANY,)
        known = self._addresses.known
        nodes = tuple(node for node, addresses in known.nodes.items() if origin.address in addresses)
        return (*nodes, *([wire.CONTROLLER] if origin.address in known.controllers else []))

    async def underlay(self, nodes: Iterable[str]) -> Mapping[str, str]:
        """The underlay addresses of nodes, as far as they are known; asks Slurm where one is not."""
        wanted = tuple(nodes)
        if any(node not in self._addresses.known.underlay for node in wanted):
            await self._learn_soon()
        known = self._addresses.known.underlay
        return {node: known[node] for node in wanted if node in known}

    async def check(self, request: wire.Request, origin: Origin) -> None:
        """FabricError when this request may not come from there."""
        if isinstance(request, wire.Together):
            for one in request.requests:
                await self.check(one, origin)
            return
        node = speaker(request)
        if node is None or origin.own_host or self._allows(node, origin):
            return
        await self._learn_soon()
        if not self._allows(node, origin):
            raise self._refusal(node, origin)

    def _allows(self, node: str, origin: Origin) -> bool:
        known = self._addresses.known
        return origin.address in (known.nodes.get(node, ()) if node else known.controllers)

    def _refusal(self, node: str, origin: Origin) -> FabricError:
        known = self._addresses.known
        if not known.every:
            return FabricError(
                "vhpcd does not know the addresses of Slurm's hosts, so it cannot check the sender",
                self._trouble,
                "see controller.slurm_bin in vhpc.toml, and the log of vhpcd",
            )
        if not node:
            return FabricError(
                f"{origin.address} may not send requests of the controller",
                f"it is neither vhpcd's own host nor one of {_some(known.controllers)}",
                "run it there, or add the address to controller.controller_addresses in vhpcd's vhpc.toml",
            )
        if node not in known.nodes:
            return FabricError(f"Slurm has no node {node[:80]}", self._trouble, "see: sinfo -N")
        return FabricError(
            f"{origin.address} may not send requests of node {node}",
            f"Slurm has the node at {_some(known.nodes[node])}",
            "if the node has this address, add it to controller.node_names or node_addresses in vhpcd's "
            "vhpc.toml",
        )

    async def keep_learning(self) -> None:
        """Ask Slurm at intervals; never returns."""
        while True:
            await self._learn_soon()
            await asyncio.sleep(AGAIN_S if self._trouble else LEARN_S)

    async def _learn_soon(self) -> None:
        """Ask Slurm, unless that was done a moment ago; concurrent callers share one query."""
        if self._learning is None:
            if self._clock() - self._asked < SOON_S:
                return
            loop = asyncio.get_running_loop()
            self._learning = asyncio.ensure_future(loop.run_in_executor(self._thread, self._addresses.learn))
            self._learning.add_done_callback(self._learnt)
        await asyncio.wait([self._learning], timeout=WAIT_S)

    def _learnt(self, done: asyncio.Future[None]) -> None:
        self._learning = None
        self._asked = self._clock()
        if done.cancelled():
            return
        err = done.exception()
        trouble = err.line() if isinstance(err, VhpcError) else repr(err) if err else ""
        if trouble and trouble != self._trouble:
            log.warning("Slurm and the resolver do not give the addresses of Slurm's hosts: %s", trouble)
        self._trouble = trouble

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def _some(addresses: frozenset[str]) -> str:
    shown = sorted(addresses)[:4]
    return (
        ", ".join(shown) + (f" and {len(addresses) - 4} more" if len(addresses) > 4 else "") or "no address"
    )
