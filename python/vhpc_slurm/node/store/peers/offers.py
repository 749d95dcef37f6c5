# SPDX-License-Identifier: Apache-2.0
"""What a node offers to the other nodes of a lease: a file in the job's run folder, for root alone."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from vhpc_slurm import files
from vhpc_slurm.errors import UNDECODABLE
from vhpc_slurm.model import Blob, Generation
from vhpc_slurm.node.host import process
from vhpc_slurm.node.store.layout import Layout

NAME = "peers.json"
LIMIT = 4 << 20
"""Bytes of an offer that are read: 64,000 nodes have names of 64 characters in it."""


class Offer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Blobs of one generation on one node.

    Attributes:
        generation: of the job.
        node: this node.
        nodes: those of the lease, which may ask.
        owner: uid of the user in whose own catalogue the image is; None: it is the site's.
        blobs: what may be asked for.
        prolog: pid and start time of the Prolog that copies them.
    """

    generation: str
    node: str
    nodes: tuple[str, ...]
    owner: int | None
    blobs: tuple[Blob, ...]
    prolog: tuple[int, int]

    def blob(self, sha256: str) -> Blob | None:
        """The blob with a digest, if it is offered."""
        return next((blob for blob in self.blobs if blob.sha256 == sha256), None)

    @property
    def may_grow(self) -> bool:
        """Whether blobs that are not there yet may still come: the Prolog lives."""
        return process.alive(process.ProcessRef(*self.prolog))


def write(layout: Layout, offer: Offer) -> None:
    """Offer blobs; an earlier offer of the generation is replaced. OSError if it cannot be written."""
    files.replace(_path(layout, Generation.parse(offer.generation)), msgspec.json.encode(offer))


def read(layout: Layout, generation: str) -> Offer | None:
    """The offer of a generation; None if it has none on this node."""
    try:
        path = _path(layout, Generation.parse(generation))
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW), "rb") as file:
            offer = msgspec.json.decode(file.read(LIMIT), type=Offer)
    except (OSError, *UNDECODABLE):
        return None
    return offer if offer.generation == generation else None


def _path(layout: Layout, generation: Generation) -> Path:
    return layout.job(generation.job_id) / NAME


def part_of(final: Path) -> Path:
    """The file in which a copy of a blob is made."""
    return final.with_name(f".{final.name}.part")


def lock_of(final: Path) -> Path:
    """The lock (flock) of the process that copies a blob."""
    return final.with_name(f".{final.name}.lock")
