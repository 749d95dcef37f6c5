"""What the controller asks of a fabric, whatever the fabric is.

The order is the controller's: ``reserve`` before the lease is durable, ``apply``
and ``verify`` between durable and READY, ``strip`` when the last node has said
that it holds nothing.  Each may be repeated after a crash.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from vhpc_slurm.model import Allocation, Generation, NetworkIdentity


class NetworkBackend(Protocol):
    """One kind of network partition.  All but ``reserve`` raise FabricError when the fabric will not."""

    def reserve(
        self, generation: Generation, allocation: Allocation, held: Iterable[NetworkIdentity]
    ) -> NetworkIdentity:
        """Choose an identity that none of ``held`` has; pure, FabricError when none is left."""

    def apply(self, generation: Generation, identity: NetworkIdentity) -> None:
        """Make the fabric carry the identity."""

    def verify(self, generation: Generation, identity: NetworkIdentity) -> None:
        """Read the fabric back; FabricError unless it carries the identity."""

    def strip(self, generation: Generation, identity: NetworkIdentity) -> None:
        """Take the identity off the fabric and read back that it is gone."""


class NoNetwork:
    """No partition: guests have no network, there is nothing to reserve or to strip."""

    def reserve(
        self, generation: Generation, allocation: Allocation, held: Iterable[NetworkIdentity]
    ) -> NetworkIdentity:
        """The identity ``none``, which any number of generations may hold."""
        del generation, allocation, held
        return NetworkIdentity(kind="none")

    def apply(self, generation: Generation, identity: NetworkIdentity) -> None:
        """Nothing to apply."""

    def verify(self, generation: Generation, identity: NetworkIdentity) -> None:
        """Nothing to read back."""

    def strip(self, generation: Generation, identity: NetworkIdentity) -> None:
        """Nothing to strip."""
