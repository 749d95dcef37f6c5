# SPDX-License-Identifier: Apache-2.0
"""An image in the node's store, which stays there as long as a generation pins it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from vhpc_slurm.model import Generation, ImageIdentity
from vhpc_slurm.node.finding import Kind, NodeFinding
from vhpc_slurm.node.resource.protocol import Resource, orphan_of
from vhpc_slurm.node.store import pins, room
from vhpc_slurm.node.store.journal import Entry, Journal
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.record import Record


class ImageData(Record, frozen=True):
    """The entry of an image."""

    digest: str


class Image(Resource):
    """The pin of an image."""

    kind = "image"

    def take(self, layout: Layout, journal: Journal, image: ImageIdentity) -> None:
        """Pin an image before it is copied."""
        journal.announce(self.kind, f"{self.kind}:{image.digest}", ImageData(image.digest))
        room.pin(layout, image, str(journal.generation))

    def release(self, layout: Layout, generation: Generation, entry: Entry) -> None:
        """Remove the pin; the image stays until its space is needed."""
        pins.unpin(layout, entry.read(ImageData).digest, str(generation))

    def orphans(self, layout: Layout) -> Iterator[NodeFinding]:
        """Pins of generations without a journal."""
        for digest, name in list(pins.pins(layout)):
            what = f"image {digest[:19]}… is pinned by generation {name[:40]!r}, which has no journal"
            repair = partial(pins.unpin, layout, digest, name)
            yield from orphan_of(layout, name, Kind.ORPHAN_PIN, what, repair)
