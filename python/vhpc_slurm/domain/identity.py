# SPDX-License-Identifier: Apache-2.0
"""The guest's identity: name, uuid, and the generation in the metadata, for reconciliation."""

from __future__ import annotations

from uuid import UUID, uuid5

from vhpc_slurm.domain.spec import DomainSpec
from vhpc_slurm.model import Generation
from vhpc_slurm.record import Record

NAMESPACE = UUID("6f0d7c1e-7a43-5c55-9b4e-0f3b3e2f9c61")
METADATA_URI = "urn:vhpc:guest:1"


class IdentityContext(Record, frozen=True):
    """Values of the identity template."""

    name: str
    uuid: str
    uri: str
    generation: str
    index: int


def domain_uuid(generation: Generation, index: int) -> str:
    """The same for the same guest of the same generation, on every node and at every call."""
    return str(uuid5(NAMESPACE, f"{generation}/g{index}"))


def context(spec: DomainSpec) -> IdentityContext:
    """Name and generation."""
    index = spec.guest.index
    return IdentityContext(
        spec.name, domain_uuid(spec.generation, index), METADATA_URI, str(spec.generation), index
    )
