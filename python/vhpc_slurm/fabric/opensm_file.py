"""The backend ``opensm-file``: OpenSM's partitions file follows the book of claims.

Each change writes the whole file.  What is not certain is refused, and then the
old file stays: a render that fails its own check, a book that is older than the
file or lacks keys of it which it does not know to have ended, an OpenSM that
does not run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

from vhpc_slurm.errors import FabricError
from vhpc_slurm.fabric import keys, partitions
from vhpc_slurm.fabric.backend import Finding, KeyPolicy, Outcomes, Proof
from vhpc_slurm.fabric.keys import Book, Claim
from vhpc_slurm.fabric.opensm import ComplaintError, Mark, SubnetManager, complaint_of
from vhpc_slurm.fabric.partitions import Partition
from vhpc_slurm.fabric.readback import Readback
from vhpc_slurm.model import Allocation, Generation, JobRequest, NetworkIdentity

log = logging.getLogger("vhpcd")


class OpensmFile:
    """Writes the file, has it read, and reads the fabric."""

    def __init__(
        self,
        policy: KeyPolicy,
        opensm: SubnetManager,
        readback: Readback,
        knows: Callable[[int, str], bool],
        *,
        site: tuple[Partition, ...] = (),
        ipoib: bool = True,
        max_lost_percent: int = 0,
    ) -> None:
        """``knows`` says whether an epoch was this database's, ``site`` are partitions beside the jobs'."""
        self._policy = policy
        self._opensm = opensm
        self._readback = readback
        self._knows = knows
        self._site = site
        self._ipoib = ipoib
        self._max_lost_percent = max_lost_percent
        # what was written last, what OpenSM was seen to have swept with, and where its log was then
        self._last: tuple[Partition, ...] | None = None
        self._swept: tuple[Partition, ...] | None = None
        self._heard: tuple[Mark, ...] | None = None
        # whether it is certain that OpenSM has read what was written last
        self._read = False

    def validate(self, book: Book) -> None:
        """Whether OpenSM is there, and its file one that this book may replace."""
        keys.refuse_strangers(keys.PKEYS, book)
        self._opensm.check()
        self._guard(self._opensm.read(), book)

    def plan(
        self, generation: Generation, request: JobRequest, allocation: Allocation, book: Book
    ) -> tuple[NetworkIdentity, Claim | None]:
        """Choose a key."""
        return self._policy.plan(generation, request, allocation, book)

    def apply(self, book: Book, *, force: bool = False) -> None:
        """Have OpenSM sweep with what the book carries; nothing where it has already.

        ``force`` writes the file also when the book seems to have lost keys.
        """
        self._bring(book, force=force)

    def verify(self, generations: Collection[Generation], book: Book) -> Outcomes:
        """Read back that the generations' ports have their keys, and nobody else has."""
        claims = [book.must(generation) for generation in generations]
        meant = self._meant(book)
        try:
            outcomes = self._readback.carried(claims, meant, book)
            if not self._read and not any(_seen(one) for one in outcomes.values()):
                # No port of theirs can show that OpenSM has read the new file: the first SUBNET UP
                # may have been of a sweep that began with the old one.  A second cannot be.
                self._opensm.sweep()
                outcomes = self._readback.carried(claims, meant, book)
            self._read = True
            self._listen()
        except FabricError:
            self._swept = None
            raise
        return self._doubting(outcomes)

    def strip(self, generations: Collection[Generation], book: Book) -> Outcomes:
        """Read back that no port has the generations' keys any more."""
        claims = [book.must(generation) for generation in generations]
        try:
            return self._doubting(self._readback.gone(claims, self._meant(book), book))
        except FabricError:
            self._swept = None
            raise

    def _doubting(self, outcomes: Outcomes) -> Outcomes:
        """The next change makes OpenSM sweep again where something could not be proven."""
        if any(isinstance(one, FabricError) for one in outcomes.values()):
            self._swept = None
        return outcomes

    def audit(self, book: Book) -> tuple[Finding, ...]:
        """Compare file, log and fabric with the book."""
        meant = self._meant(book)
        found = [Finding(0, what, True) for what in self._file_findings(meant)]
        try:
            self._listen()
        except ComplaintError as err:
            found.append(Finding(0, err.line(), True))
        found += self._readback.findings(meant)
        if found:
            self._swept = None  # whatever OpenSM has now, the next change makes it sweep
        return tuple(found)

    def cure(self, book: Book) -> None:
        """Write the file anew, whatever OpenSM was seen to have, and let it sweep."""
        self._swept = None
        self._bring(book)

    def _file_findings(self, meant: tuple[Partition, ...]) -> list[str]:
        data = self._opensm.read()
        if data is None:
            return [f"{self._opensm.partitions} is gone: at its next sweep OpenSM opens the fabric"]
        defects = partitions.lint(data)
        if defects:
            return [f"{self._opensm.partitions} line {one.line}: {one.reason}" for one in defects[:10]]
        if partitions.parse(data) != meant:
            return [f"{self._opensm.partitions} is not what vhpcd wrote"]
        return self._opensm.differing()

    def _bring(self, book: Book, *, force: bool = False) -> None:
        meant = self._meant(book)
        old = self._opensm.read()
        if not force:
            self._guard(old, book)
        same = old is not None and not partitions.lint(old) and partitions.parse(old) == meant
        same = same and not self._opensm.differing()
        if same and self._swept == meant:
            return
        self._swept, self._read = None, False
        data = partitions.render(meant, book.epoch, book.tag)
        partitions.parse(data, "what vhpcd would write")
        self._heard = self._opensm.mark()
        if not same:
            self._opensm.replace(data)
        before, self._last = self._last, meant
        self._readback.look_ahead()
        try:
            self._opensm.sweep()
        except ComplaintError:
            if self._go_back(old, data):
                self._last = before
            raise
        self._swept = meant

    def _go_back(self, old: bytes | None, new: bytes) -> bool:
        """OpenSM did not like the new file, so the fabric may be open: rather the last one, if there is."""
        if old is None or old == new or partitions.lint(old):
            return False
        log.error("OpenSM refuses the new partitions, the last ones are put back")
        try:
            self._opensm.replace(old)
            self._opensm.sweep()
        except FabricError as err:
            log.critical("the last partitions cannot be put back: %s", err.line())
            return False
        return True

    def _guard(self, old: bytes | None, book: Book) -> None:
        """FabricError when this book may not be the one that the keys on the fabric came from.

        What was written last says so: before the first time, that is the file.
        A file that the linter refuses has no keys that anybody could lose.
        """
        since = 0
        if self._last is not None:
            had = self._last
        elif old is None:
            return
        else:
            had = () if partitions.lint(old) else partitions.parse(old)
            since = self._origin(old, had)
        kept = {one.pkey for one in (partitions.DEFAULT, *self._site)}
        lost = book.missing({one.pkey for one in had} - kept, since, self._max_lost_percent)
        if lost:
            raise FabricError(
                f"vhpcd does not know {len(lost)} keys of {self._opensm.partitions}",
                f"the first is {min(lost):#06x}; to write the file would take them from their jobs",
                "is the database damaged? see fabric.max_lost_percent in vhpc.toml(5)",
            )

    def _origin(self, old: bytes, had: tuple[Partition, ...]) -> int:
        """The epoch that the file was made of; FabricError when it was another database's."""
        origin = partitions.origin(old)
        ours = {one.pkey for one in (partitions.DEFAULT, *self._site)}
        if origin is None and {one.pkey for one in had} <= ours:
            return 0
        if origin is None or not self._knows(*origin):
            raise FabricError(
                f"{self._opensm.partitions} was not made of this database of vhpcd",
                f"it is of epoch {origin[0]} of another" if origin else "it has keys, and no epoch",
                "was the database restored from a copy? when no job with guests is left, "
                "put a file with nothing but Default in the place of this one",
            )
        return origin[0]

    def _listen(self) -> None:
        """FabricError when OpenSM has complained since its file was last written."""
        if self._heard is None:
            self._heard = self._opensm.mark()
        end = self._opensm.mark()
        found = complaint_of(b"\n".join(self._opensm.since(self._heard)))
        if found:
            raise ComplaintError("OpenSM has complained", found[0])
        self._heard = end

    def _meant(self, book: Book) -> tuple[Partition, ...]:
        return (*partitions.of_book(book, ipoib=self._ipoib), *self._site)


def _seen(outcome: Proof | FabricError) -> bool:
    return isinstance(outcome, Proof) and outcome.seen > 0
