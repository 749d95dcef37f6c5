# SPDX-License-Identifier: Apache-2.0
"""The backend ``static-pool``: every key is declared once, with all GUIDs it can ever have.

Nothing is written when jobs start or end: a port that appears with a GUID of the pool
gets its key from the subnet manager at once, and loses it with the GUID. The backend
chooses keys and reads port tables back.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from vhpc_slurm.errors import FabricError
from vhpc_slurm.fabric import filewatch, keys, numbers, partitions, plainfile
from vhpc_slurm.fabric.backend import ByPolicy, FabricFinding, KeyPolicy, ProofResults
from vhpc_slurm.fabric.filewatch import FileWatch, Watched
from vhpc_slurm.fabric.keys import KeySnapshot
from vhpc_slurm.fabric.opensm import MAX_FILE
from vhpc_slurm.fabric.partitions import IbPartition
from vhpc_slurm.fabric.plainfile import NotPlainError
from vhpc_slurm.fabric.readback import Readback
from vhpc_slurm.model import Generation


class StaticPool(ByPolicy):
    """Reads the fabric; the site installs the file."""

    def __init__(
        self,
        policy: KeyPolicy,
        readback: Readback,
        pool: tuple[IbPartition, ...],
        site: tuple[IbPartition, ...],
        file: Path,
    ) -> None:
        """``pool`` and ``site`` are what ``file`` must contain, where it is on this host."""
        super().__init__(policy)
        self._readback = readback
        self._site = site
        self._declared = (*pool, *site)
        self._file = file
        self._changed = False

    def validate(self, snapshot: KeySnapshot) -> None:
        """Whether the file declares the pool that the configuration describes."""
        keys.refuse_other_spaces(numbers.PKEYS, snapshot)
        for what in self._file_findings():
            raise FabricError("the static pool is not declared", what, "install: vhpc fabric render --pool")

    def apply(self, snapshot: KeySnapshot, *, force: bool = False) -> None:
        """Nothing: all keys are declared already."""

    def verify(self, generations: Collection[Generation], snapshot: KeySnapshot) -> ProofResults:
        """Read back that the generations' ports have exactly their keys, and that no other port has these."""
        assignments = [snapshot.must(generation) for generation in generations]
        theirs = {assignment.pkey for assignment in assignments}
        expected = (one for one in self._expected(snapshot) if one.pkey in theirs)
        return self._readback.carried(assignments, (*expected, *self._site), snapshot)

    def strip(self, generations: Collection[Generation], snapshot: KeySnapshot) -> ProofResults:
        """Read back that no port of the generations is left on the fabric with its key."""
        assignments = [snapshot.must(generation) for generation in generations]
        return self._readback.gone(assignments, (*partitions.of_snapshot(snapshot), *self._site), snapshot)

    def audit(self, snapshot: KeySnapshot, *, unsure: bool = False) -> tuple[FabricFinding, ...]:
        """Compare the file with what was declared, and the fabric also with the keys of jobs."""
        del unsure
        try:
            file = tuple(FabricFinding(0, what, open=True) for what in self._file_findings())
        except FabricError as err:
            file = (FabricFinding(0, err.line(), open=isinstance(err, NotPlainError), unread=True),)
        return (*file, *self._readback.findings(self._expected(snapshot)))

    def _expected(self, snapshot: KeySnapshot) -> tuple[IbPartition, ...]:
        """The partitions that ports must have, with keys of jobs that the site has taken out of the pool
        since."""
        declared = {one.pkey for one in self._declared}
        others = (one for one in partitions.of_snapshot(snapshot) if one.pkey not in declared)
        return (*self._declared, *others)

    def repair(self, snapshot: KeySnapshot) -> None:
        """FabricError: the site installs the file."""
        del snapshot
        raise FabricError(
            "vhpcd does not write the file of a static pool",
            hint="install: vhpc fabric render --pool, and SIGHUP",
        )

    def watch(self, notice: Callable[[], None]) -> FileWatch | None:
        """Watch the file, where it is on this host."""
        if not self._file.parent.is_dir():
            return None

        def changed() -> None:
            self._changed = True
            notice()

        return filewatch.start([Watched(self._file)], changed)

    def disturbed(self) -> bool:
        """Whether the file was written."""
        changed, self._changed = self._changed, False
        return changed

    def _file_findings(self) -> list[str]:
        """Defects of the file; FabricError if it cannot be read."""
        data = plainfile.read_file(self._file, MAX_FILE)
        if data is None:
            return []  # the subnet manager runs on another host, or in a switch
        defects = partitions.lint(data)
        if defects:
            return [f"{self._file} line {one.line}: {one.reason}" for one in defects[:10]]
        if partitions.parse(data) != self._declared:
            return [f"{self._file} is not what the configuration describes"]
        return []
