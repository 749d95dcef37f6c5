# SPDX-License-Identifier: Apache-2.0
"""An NVSwitch partition that joins the GPUs of one guest."""

from __future__ import annotations

from collections.abc import Mapping

from vhpc_slurm.errors import NodeError, TeardownError
from vhpc_slurm.model import Generation, NodePlan
from vhpc_slurm.node.devices.nvswitch import Fmpm, Provider, choose, is_active
from vhpc_slurm.node.resource.protocol import Resource
from vhpc_slurm.node.store.journal import Entry, Journal
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.record import Record


class PartitionData(Record, frozen=True):
    """The entry of an NVSwitch partition."""

    number: int


class NvSwitch(Resource):
    """An active NVSwitch partition."""

    kind = "nvswitch"

    def take(self, provider: Provider, journal: Journal, plan: NodePlan, modules: Mapping[str, int]) -> None:
        """Activate the partition of each guest with GPUs.

        Args:
            provider: the service that manages the partitions.
            journal: the job's journal.
            plan: has the GPUs of each guest.
            modules: module by key.

        Raises:
            UserError, FabricError: as ``choose``.
            NodeError: the GPU map lacks a module, a partition is in use, or does not become active.
            Stopped: the job was ended meanwhile.
        """
        for guest in plan.guests:
            gpus = [device.key for device in guest.devices if device.traits.nvswitch]
            if not gpus:
                continue
            unknown = [address for address in gpus if address not in modules]
            if unknown:
                raise NodeError(
                    f"the GPU map of {plan.node} has no module for {', '.join(unknown)}",
                    "the Fabric Manager identifies GPUs only by their modules",
                    "write it after the address: INDEX ADDRESS MODULE",
                )
            one = choose(provider.partitions(), frozenset(modules[address] for address in gpus), plan.node)
            if one.active:
                raise NodeError(
                    f"NVSwitch partition {one.number} of {plan.node} is active already",
                    "no job holds it: another program activated it, or a crash left it active",
                    f"fmpm -d {one.number}, when no process uses its GPUs",
                )
            journal.announce(self.kind, f"{self.kind}:{one.number}", PartitionData(one.number))
            provider.activate(one.number)
            if not is_active(provider, one.number):
                raise NodeError(f"NVSwitch partition {one.number} of {plan.node} does not become active")

    def release(self, layout: Layout, generation: Generation, entry: Entry) -> None:
        """Deactivate the partition, if it is active; TeardownError if it stays so, or cannot be read."""
        del generation
        provider, number = Fmpm(layout.config.devices), entry.read(PartitionData).number
        try:
            if is_active(provider, number):
                provider.deactivate(number)
            left = is_active(provider, number)
        except NodeError as err:
            raise TeardownError(f"NVSwitch partition {number} may still be active", err.line()) from err
        if left:
            raise TeardownError(f"NVSwitch partition {number} is still active", "", f"fmpm -d {number}")
