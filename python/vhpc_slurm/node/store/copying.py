# SPDX-License-Identifier: Apache-2.0
"""Copies one blob into the store: from other nodes of the lease if they serve it, else from the catalogue."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

from msgspec import Struct, field

from vhpc_slurm.errors import UserError
from vhpc_slurm.model import Blob
from vhpc_slurm.node.store import blobsource
from vhpc_slurm.node.store.blobsource import Source
from vhpc_slurm.node.store.part import Part, WrongChunkError
from vhpc_slurm.node.store.peers.client import Peers, PeerSource
from vhpc_slurm.node.store.peers.wire import PeerError
from vhpc_slurm.record import Record

CHUNK = 1 << 20
LOOK_S = 1.0
"""Longest wait for the next bytes of the catalogue before the caller is asked, in seconds."""
CATALOGUE = "catalogue"
KEPT = "kept"
"""In ``Tally.bytes``: read from the catalogue; left by an earlier copy. Other keys are nodes."""


class Tally(Struct):
    """Bytes of an image by their source, also those that were of no use."""

    bytes: dict[str, int] = field(default_factory=dict)

    def add(self, source: str, size: int) -> None:
        """So many bytes came from there."""
        if size:
            self.bytes[source] = self.bytes.get(source, 0) + size


class BlobCopy(Record, frozen=True):
    """One copy of one blob; the caller holds the blob's lock and has made room.

    Attributes:
        image: its name, for messages.
        blob: what is copied.
        catalogue: opens the blob in the catalogue at a byte.
        peers: other nodes; None: only the catalogue is read.
        due: whether to yield; gets what is waited for, and raises when the time is over.
        left_s: seconds until then.
        tally: counts bytes.
    """

    image: str
    blob: Blob
    catalogue: Callable[[int], contextlib.AbstractContextManager[Source]]
    peers: Peers | None
    due: Callable[[str], bool]
    left_s: Callable[[], float]
    tally: Tally

    def run(self, part: Part, final: Path) -> Generator[None, None, None]:
        """Complete a part and give it its name.

        Raises:
            UserError: the catalogue's blob is missing or damaged.
            OSError: it cannot be written, or the catalogue not be read.
        """
        for _ in part.resume():
            if self._is_due(part):
                yield
        self.tally.add(KEPT, part.resumed)
        used = yield from self._complete(part, self.peers)
        if part.found() != self.blob.sha256:
            yield from self._compare(part)
        if part.found() != self.blob.sha256 and (used or part.resumed):
            # without a chunk list only the whole shows that an earlier copy or another node was wrong
            part.restart()
            yield from self._complete(part, None)
        if part.found() != self.blob.sha256:
            raise self._damaged(part)
        part.finish(final)

    def _complete(self, part: Part, peers: Peers | None) -> Generator[None, None, bool]:
        """Get all that is missing; returns whether other nodes sent some of it."""
        used, stalled = False, False
        while part.size < self.blob.size:
            source = None
            if peers is not None:
                source = yield from peers.find(self.blob, part.next_byte, self.due, more=stalled)
            if source is None or peers is None:
                yield from self._from_catalogue(part)
                continue
            used = True
            try:
                with contextlib.closing(source):
                    yield from self._from_peer(source, part)
                    source.finished()
            except (PeerError, WrongChunkError) as err:
                peers.useless(source.node, str(err))
                part.forget()
                stalled = isinstance(err, _StalledError)
        return used

    def _from_peer(self, source: PeerSource, part: Part) -> Generator[None, None, None]:
        assert self.peers is not None
        pace, began, first = self.peers.lineage.pace, time.monotonic(), part.size
        source.heard = moved = began
        while part.size < self.blob.size:
            now = time.monotonic()
            if source.wait(pace.look_s):
                data = source.read(min(CHUNK, part.wanted))
                if data:
                    self.tally.add(source.node, len(data))
                    before = part.size
                    part.add(data, checked=True)
                    # single bytes are no progress: a node that sends a chunk too slowly is left
                    moved = time.monotonic() if part.size > before else moved
            if now - source.heard > pace.silent_s:
                raise PeerError("it fell silent")
            if now - moved > pace.stall_s:
                raise _StalledError(f"nothing new for {pace.stall_s:g} s")
            passed = now - began
            if passed > pace.stall_s and (self.blob.size - part.size) * passed > self.left_s() * (
                part.size - first
            ):
                raise PeerError("at its speed the deadline would pass")
            if self._is_due(part):
                yield

    def _from_catalogue(self, part: Part) -> Generator[None, None, None]:
        with self.catalogue(part.next_byte) as source:
            while part.size < self.blob.size:
                if source.wait(LOOK_S):
                    data = source.read(min(CHUNK, part.wanted))
                    if not data:
                        self._ended(source, part)
                    self.tally.add(CATALOGUE, len(data))
                    part.add(data, checked=False)  # the digest of the whole decides
                if self._is_due(part):
                    yield

    def _compare(self, part: Part) -> Iterator[None]:
        """Say which chunk is wrong, if there is a chunk list: those of other nodes were compared before."""
        try:
            for _ in part.compare():
                if self._is_due(part):
                    yield
        except WrongChunkError as err:
            part.path.unlink(missing_ok=True)
            raise blobsource.damaged(self.image, self.blob, f"{err} of the catalogue") from err

    def _ended(self, source: Source, part: Part) -> None:
        """The catalogue's file is shorter than the blob."""
        if why := source.why_ended():
            part.path.unlink(missing_ok=True)
            raise UserError(
                f"image {self.image} is incomplete",
                f"its {self.blob.file} cannot be read: {why}",
                "publish it again",
            )
        raise self._damaged(part)

    def _damaged(self, part: Part) -> UserError:
        part.path.unlink(missing_ok=True)
        found = f"sha256 {part.found()[:16]}… and {self.blob.size - part.wanted} bytes"
        says = f"it has {found}, the manifest says {self.blob.sha256[:16]}… and {self.blob.size}"
        return blobsource.damaged(self.image, self.blob, says)

    def _is_due(self, part: Part) -> bool:
        return self.due(f"{(self.blob.size - part.size) >> 20} MiB of its {self.blob.file} are left")


class _StalledError(PeerError):
    """A node lives and has nothing new."""
