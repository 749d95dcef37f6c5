# SPDX-License-Identifier: Apache-2.0
"""Entropy from the host, so that a guest's first boot does not wait for its own."""

from __future__ import annotations

from dataclasses import dataclass

from vhpc_slurm.domain import slots
from vhpc_slurm.domain.spec import DomainSpec


@dataclass(frozen=True)
class RngContext:
    """Values of the rng template."""

    device: str
    slot: int


def context(_spec: DomainSpec) -> RngContext:
    """The host's non-blocking generator."""
    return RngContext("/dev/urandom", slots.RNG)
