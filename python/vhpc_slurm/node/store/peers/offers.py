# SPDX-License-Identifier: Apache-2.0
"""The offer of a node to other nodes: a file for root alone, in the job's run folder.

A node that ``vhpc image warm`` prepares has no lease. Its offer is in a folder of its own, under the
name of that run, and is valid as long as the process lives that made it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import msgspec

from vhpc_slurm import files
from vhpc_slurm.model import Blob, Generation
from vhpc_slurm.node.host import process
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.undecodable import UNDECODABLE

NAME = "peers.json"
LIMIT = 4 << 20
"""Bytes of an offer that are read: 64,000 nodes have names of 64 characters in it."""
RUN = re.compile(r"warm-[0-9a-f]{32}\Z", re.ASCII)
"""The name of a run of ``vhpc image warm``, in place of a generation."""


class Offer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Blobs of one generation, or of one run of ``vhpc image warm``, on one node.

    Attributes:
        generation: of the job; or the name of the run.
        node: this node.
        nodes: those of the lease or of the run, which may ask.
        owner: uid of the user in whose own catalogue the image is; None: it is the site's.
        blobs: what may be asked for.
        prolog: pid and start time of the Prolog that copies them, or of ``vhpc image stage``.
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
    path = _path(layout, offer.generation)
    if RUN.match(offer.generation):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    files.replace(path, msgspec.json.encode(offer))


def read(layout: Layout, generation: str) -> Offer | None:
    """The offer of a generation or a run; None if it has none on this node."""
    try:
        path = _path(layout, generation)
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW), "rb") as file:
            offer = msgspec.json.decode(file.read(LIMIT), type=Offer)
    except (OSError, *UNDECODABLE):
        return None
    if offer.generation != generation or (RUN.match(generation) and not offer.may_grow):
        return None
    return offer


def withdraw(layout: Layout, offer: Offer, sha256: str) -> None:
    """Offer everything but one blob, which this node does not get. OSError if it cannot be written."""
    rest = tuple(blob for blob in offer.blobs if blob.sha256 != sha256)
    if read(layout, offer.generation) is not None:
        write(layout, msgspec.structs.replace(offer, blobs=rest))


def end(layout: Layout, run: str) -> None:
    """Remove the offer of a run, and those that killed processes of other runs have left."""
    for path in layout.warming.glob("warm-*.json"):
        if path.stem == run or read(layout, path.stem) is None:
            path.unlink(missing_ok=True)


def _path(layout: Layout, generation: str) -> Path:
    if RUN.match(generation):
        return layout.warming / f"{generation}.json"
    return layout.job(Generation.parse(generation).job_id) / NAME


def part_of(final: Path) -> Path:
    """The file in which a copy of a blob is made."""
    return final.with_name(f".{final.name}.part")


def lock_of(final: Path) -> Path:
    """The lock (flock) of the process that copies a blob."""
    return final.with_name(f".{final.name}.lock")
