# SPDX-License-Identifier: Apache-2.0
"""Requests of an operator about the fabric: fence a node, clear a tombstone, tell the fabric again."""

from __future__ import annotations

import logging
from functools import partial

from vhpc_slurm.controller.api import protocol as wire
from vhpc_slurm.controller.leases.executor import LeaseExecutor
from vhpc_slurm.controller.leases.operator import OperatorActions
from vhpc_slurm.controller.sync.batch import FabricBatches
from vhpc_slurm.controller.sync.scheduler import FabricThread
from vhpc_slurm.errors import FabricError
from vhpc_slurm.model import Generation

log = logging.getLogger("vhpcd")


class Operating:
    """Belongs to the event loop."""

    def __init__(
        self,
        operator: OperatorActions,
        executor: LeaseExecutor,
        batches: FabricBatches,
        thread: FabricThread,
    ) -> None:
        """``batches`` run in ``thread``."""
        self._operator = operator
        self._executor = executor
        self._batches = batches
        self._thread = thread

    async def fence(self, request: wire.Fence, uid: int) -> wire.Fenced:
        """The node is off: ended generations wait for it no longer."""
        fenced, in_use = await self._executor.write(self._operator.fence, request.node, uid)
        return wire.Fenced(generations=tuple(map(str, fenced)), in_use=tuple(map(str, in_use)))

    async def tell(self, request: wire.TellFabric, uid: int) -> None:
        """Tell the fabric again what it should carry."""
        log.warning("uid %d has vhpcd tell the fabric again%s", uid, ", by force" * request.force)
        await self._thread.run(partial(self._batches.run, repeat=True, force=request.force))

    async def clear(self, request: wire.ClearKey, uid: int) -> None:
        """Remove tombstones in a batch; FabricError when a port still has the key."""
        generations = tuple(map(Generation.parse, request.generations))
        await self._executor.write(self._operator.clear, generations, uid)
        try:
            results = await self._thread.run(self._batches.run)
        finally:
            # A tombstone that was not removed now must not be removed later without the operator's knowledge.
            await self._executor.write(self._operator.keep, generations)
        for generation in generations:
            if isinstance(why := results.get(generation), FabricError):
                raise why
