# SPDX-License-Identifier: Apache-2.0
"""The backend ``opensm-file``: OpenSM's partitions file follows the key assignments.

Each change writes the whole file. A doubtful change is refused, and the old file
stays: a file that fails the linter, a snapshot that is older than the file or that
lacks keys of the file without a record of their end, an OpenSM that does not run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator

from vhpc_slurm.errors import FabricError
from vhpc_slurm.fabric import filewatch, keys, numbers, partitions, rewrite
from vhpc_slurm.fabric.backend import ByPolicy, FabricFinding, KeyPolicy, Proof, ProofResults
from vhpc_slurm.fabric.filewatch import FileWatch, Watched
from vhpc_slurm.fabric.keys import KeySnapshot, KeyState
from vhpc_slurm.fabric.opensm import ComplaintError, Opensm, SubnetManager
from vhpc_slurm.fabric.opensm_logs import OpensmLogs
from vhpc_slurm.fabric.partitions import IbPartition
from vhpc_slurm.fabric.plainfile import NotPlainError
from vhpc_slurm.fabric.readback import Expected, Readback
from vhpc_slurm.model import Generation

log = logging.getLogger("vhpcd")

SLACK = 1 << 20
"""Bytes that a file may have beyond twice what vhpcd would write; a longer one is not parsed."""
MAX_BLOCKS = 4
"""Blocks of a port's table that can be written again: 128 keys, the size of adapters' tables."""

NEW = (KeyState.RESERVED, KeyState.APPLIED)
"""States of assignments whose ports are proven after the next sweep."""


class OpensmFile(ByPolicy):
    """Writes the file, has it read, and reads the fabric."""

    def __init__(
        self,
        policy: KeyPolicy,
        opensm: SubnetManager,
        readback: Readback,
        knows: Callable[[int, str], bool],
        *,
        site: tuple[IbPartition, ...] = (),
        ipoib: bool = True,
        max_lost_percent: int = 0,
    ) -> None:
        """``knows`` says whether this database had an epoch; ``site`` are the site's own partitions."""
        super().__init__(policy)
        self._opensm = opensm
        self._readback = readback
        self._knows = knows
        self._site = site
        self._ipoib = ipoib
        self._max_lost_percent = max_lost_percent
        # what was written last, and what OpenSM is known to have swept with
        self._last: tuple[IbPartition, ...] | None = None
        self._swept: tuple[IbPartition, ...] | None = None
        self._logs = OpensmLogs(opensm.each())
        # the bytes of the last file, and what they mean
        self._wrote: tuple[bytes, tuple[IbPartition, ...]] | None = None
        # whether it is certain that OpenSM has read what was written last
        self._read = False

    def validate(self, snapshot: KeySnapshot) -> None:
        """FabricError unless OpenSM runs, and this snapshot may replace its file."""
        keys.refuse_other_spaces(numbers.PKEYS, snapshot)
        self._opensm.check()
        self._guard(self._opensm.read(), snapshot)
        jobs = {one.pkey: one.generation for one in snapshot.carried()}
        for site in self._site:
            if site.pkey in jobs:
                log.warning(
                    "the site's partition %s waits until %s has ended: its key is %#06x",
                    site.name,
                    jobs[site.pkey],
                    site.pkey,
                )

    def apply(self, snapshot: KeySnapshot, *, force: bool = False) -> None:
        """Have OpenSM sweep with what the snapshot carries, unless it has already.

        ``force`` writes the file also when the snapshot seems to have lost keys.
        """
        self._bring(snapshot, force=force)

    def verify(self, generations: Collection[Generation], snapshot: KeySnapshot) -> ProofResults:
        """Read back that the generations' ports have their keys, and no other port has."""
        assignments = [snapshot.must(generation) for generation in generations]
        meant = self._meant(snapshot)
        try:
            self._logs.reading()
            outcomes = self._readback.carried(assignments, meant, snapshot)
            if not self._read and not any(_seen(one) for one in outcomes.values()):
                # None of their ports shows that OpenSM has read the new file: the first SUBNET UP may
                # belong to a sweep that began with the old one.  A second one cannot.
                self._opensm.sweep()
                self._logs.reading()
                outcomes = self._readback.carried(assignments, meant, snapshot)
            self._read = True
            for err in self._logs.complaints():
                raise err
        except FabricError:
            self._swept = None
            raise
        return self._sweep_unless_proven(outcomes)

    def strip(self, generations: Collection[Generation], snapshot: KeySnapshot) -> ProofResults:
        """Read back that no port has the generations' keys any more."""
        assignments = [snapshot.must(generation) for generation in generations]
        self._logs.reading()
        try:
            return self._sweep_unless_proven(
                self._readback.gone(assignments, self._meant(snapshot), snapshot)
            )
        except FabricError:
            self._swept = None
            raise

    def _sweep_unless_proven(self, outcomes: ProofResults) -> ProofResults:
        """The next change makes OpenSM sweep again where something could not be proven."""
        if any(isinstance(one, FabricError) for one in outcomes.values()):
            self._swept = None
        return outcomes

    def audit(self, snapshot: KeySnapshot, *, unsure: bool = False) -> tuple[FabricFinding, ...]:
        """Compare files, logs and fabric with the snapshot."""
        meant = self._meant(snapshot)
        files = self._file_findings(None if unsure else meant)
        complaints = tuple(self._complaints())
        self._logs.reading()
        found = (*files, *complaints, *self._readback.findings(meant))
        if found:
            self._swept = None  # whatever OpenSM has now, the next change makes it sweep
        return found

    def repair(self, snapshot: KeySnapshot) -> None:
        """Write the file again, and have OpenSM write the tables that still differ.

        All OpenSM that can be reached are repaired before FabricError is raised for the others.
        """
        self._swept = None
        away = self._bring(snapshot, repairing=True)
        self._rewrite(snapshot)
        if away is not None:
            raise away

    def watch(self, notice: Callable[[], None]) -> FileWatch | None:
        """Watch files and logs of OpenSM on this host; changed files are restored at once."""
        here = [one for one in self._opensm.each() if isinstance(one, Opensm)]
        return filewatch.start([Watched(one.file, one.log, one.put_back) for one in here], notice)

    def disturbed(self) -> bool:
        """Whether OpenSM has swept since the fabric was last read, or a file is not what was written."""
        return self._logs.swept() or any(
            one.touched() for one in self._opensm.each() if isinstance(one, Opensm)
        )

    def _file_findings(self, meant: tuple[IbPartition, ...] | None) -> list[FabricFinding]:
        """Defects of the files of all OpenSM; with None any file that OpenSM can read is right."""
        found: list[FabricFinding] = []
        first: tuple[str, bytes | None] | None = None
        for manager in self._opensm.each():
            name = str(manager.partitions)
            try:
                data = manager.read()
            except FabricError as err:
                # OpenSM cannot read it either if it is not a file: its next sweep opens the fabric.
                found.append(FabricFinding(0, err.line(), open=isinstance(err, NotPlainError), unread=True))
                continue
            if first is None or meant is None:
                first = (name, data)
                found += [FabricFinding(0, what, open=True) for what in self._defects(name, data, meant)]
            elif data != first[1]:
                found.append(FabricFinding(0, f"{name} is not the same file as {first[0]}", open=True))
        return found

    def _defects(self, name: str, data: bytes | None, meant: tuple[IbPartition, ...] | None) -> list[str]:
        if data is None:
            return [f"{name} is missing: at its next sweep OpenSM opens the fabric"]
        if self._wrote is not None and data == self._wrote[0] and meant in (None, self._wrote[1]):
            return []
        if meant is not None and len(data) > 2 * len(partitions.render(meant, 0)) + SLACK:
            return [f"{name} has {len(data)} bytes, which is not what vhpcd wrote"]
        defects = partitions.lint(data)
        if defects:
            return [f"{name} line {one.line}: {one.reason}" for one in defects[:10]]
        if meant is not None and partitions.parse(data) != meant:
            return [f"{name} is not what vhpcd wrote"]
        return []

    def _complaints(self) -> Iterator[FabricFinding]:
        """Errors in the logs since the files were last written."""
        for err in self._logs.complaints():
            heard = isinstance(err, ComplaintError)
            yield FabricFinding(0, err.line(), open=heard, unread=not heard)

    def _bring(
        self, snapshot: KeySnapshot, *, force: bool = False, repairing: bool = False
    ) -> FabricError | None:
        """Have OpenSM sweep with what the snapshot carries.

        Returns why one of them could not be given the file; FabricError unless ``repairing``.
        """
        meant = self._meant(snapshot)
        old = self._old()
        if not force:
            self._guard(old, snapshot)
        same = old is not None and not partitions.lint(old) and partitions.parse(old) == meant
        same = same and not self._opensm.differing()
        if same and self._swept == meant:
            return None
        self._swept, self._read = None, False
        data = partitions.render(meant, snapshot.epoch, snapshot.tag)
        partitions.parse(data, "the file that vhpcd would write")
        if repairing:
            self._logs.repairing()
        else:
            self._logs.writing()
        away: FabricError | None = None
        if not repairing and (not same or self._wrote is None):
            self._opensm.replace(data)
        before, self._last = self._last, meant
        self._wrote = (data, meant)
        new = (one for one in snapshot.assignments if one.state in NEW and one.generation not in snapshot.off)
        self._readback.look_ahead(() if repairing else new)
        try:
            if repairing:
                away = self._opensm.repair(data)
            else:
                self._opensm.sweep()
        except ComplaintError:
            if self._go_back(old, data):
                self._last = before
            raise
        if away is None:
            self._swept = meant
        return away

    def _old(self) -> bytes | None:
        """The file that would be replaced; None where there is none, or no file in its place."""
        try:
            return self._opensm.read()
        except NotPlainError as err:
            log.error("%s; it is replaced", err.line())
            return None

    def _rewrite(self, snapshot: KeySnapshot) -> None:
        """Have OpenSM write tables again that it takes to be right: see ``rewrite``.

        The next audit finds the tables that are still wrong.
        """
        meant = self._meant(snapshot)
        expected = Expected(meant)
        if not expected.wrong_ports(self._readback.scan()):
            return
        self._opensm.sweep()  # what was just heard to end may have begun with the old file
        for block in range(MAX_BLOCKS):
            scan = self._readback.scan()
            wrong = expected.wrong_ports(scan)
            if not wrong:
                return
            free = rewrite.free_keys(self._policy.pool, snapshot)
            extra = rewrite.extra_partitions(wrong, expected, scan, free, block)
            if not extra:
                break
            log.warning(
                "tables of %d ports (the first is %#018x) were changed behind OpenSM: "
                "it is made to write block %d of them again",
                len(wrong),
                wrong[0].guid,
                block,
            )
            try:
                self._read_whole(partitions.render((*meant, *extra), snapshot.epoch, snapshot.tag))
            finally:
                data = partitions.render(meant, snapshot.epoch, snapshot.tag)
                self._wrote = (data, meant)
                self._read_whole(data)

    def _read_whole(self, data: bytes) -> None:
        """Have a sweep with this file: the first one that ends may have begun with the file before.

        Without the second one OpenSM might never see a file that is replaced again at once.
        """
        self._opensm.repair(data)
        self._opensm.sweep()

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

    def _guard(self, old: bytes | None, snapshot: KeySnapshot) -> None:
        """FabricError when the keys on the fabric may come from another database.

        They are compared with what was written last; at first, with the file. A file that
        the linter refuses has no keys that could be lost.
        """
        since = 0
        if self._last is not None:
            had = self._last
        elif old is None:
            return
        else:
            had = () if partitions.lint(old) else partitions.parse(old)
            had = tuple(one for one in had if not rewrite.is_extra(one))
            since = self._origin(old, had)
        kept = {one.pkey for one in (partitions.DEFAULT, *self._site)}
        lost = snapshot.missing({one.pkey for one in had} - kept, since, self._max_lost_percent)
        if lost:
            raise FabricError(
                f"vhpcd does not know {len(lost)} keys of {self._opensm.partitions}",
                f"the first is {min(lost):#06x}; writing the file would take them from their jobs",
                "is the database damaged? see fabric.max_lost_percent in vhpc.toml(5)",
            )

    def _origin(self, old: bytes, had: tuple[IbPartition, ...]) -> int:
        """The epoch of the file; FabricError when another database wrote it."""
        origin = partitions.origin(old)
        ours = {one.pkey for one in (partitions.DEFAULT, *self._site)}
        if origin is None and {one.pkey for one in had} <= ours:
            return 0
        if origin is None or not self._knows(*origin):
            raise FabricError(
                f"{self._opensm.partitions} was not written from this database of vhpcd",
                f"it has epoch {origin[0]} of another database" if origin else "it has keys, and no epoch",
                "was the database restored from a copy? when no job with guests is left, "
                "replace it by a file with nothing but Default",
            )
        return origin[0]

    def _meant(self, snapshot: KeySnapshot) -> tuple[IbPartition, ...]:
        """The partitions for the file; a partition of the site waits while a job has its key.

        That happens after the site has taken the key out of the pool. OpenSM would join the two.
        """
        ours = partitions.of_snapshot(snapshot, ipoib=self._ipoib)
        taken = {one.pkey for one in ours}
        return (*ours, *(one for one in self._site if one.pkey not in taken))


def _seen(outcome: Proof | FabricError) -> bool:
    return isinstance(outcome, Proof) and outcome.seen > 0
