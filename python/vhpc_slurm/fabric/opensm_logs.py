# SPDX-License-Identifier: Apache-2.0
"""New lines in the logs of OpenSM: since their files were written, and since the fabric was read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from vhpc_slurm.errors import FabricError
from vhpc_slurm.fabric.opensm import (
    COMPLAINTS,
    SWEPT,
    ComplaintError,
    Mark,
    Opensm,
    SubnetManager,
    complaint_of,
)

_LONGEST = max(map(len, (SWEPT, *COMPLAINTS)))


class OpensmLogs:
    """Marks in the logs; logs on other hosts are read in audits only."""

    def __init__(self, managers: Sequence[SubnetManager]) -> None:
        self._managers = managers
        self._written: dict[int, tuple[Mark, ...]] = {}
        self._read: dict[int, tuple[Mark, ...]] = {}

    def writing(self) -> None:
        """Files are about to be written; FabricError when a log cannot be read."""
        self._written = {number: one.mark() for number, one in enumerate(self._managers)}

    def repairing(self) -> None:
        """Files are about to be written wherever that is possible."""
        self._written = {}
        for number, one in enumerate(self._managers):
            with contextlib.suppress(FabricError):
                self._written[number] = one.mark()

    def reading(self) -> None:
        """The fabric is about to be read, after all sweeps that were asked for."""
        self._read = {}
        for number, one in self._here():
            with contextlib.suppress(FabricError):
                self._read[number] = one.mark()

    def complaints(self) -> Iterator[FabricError]:
        """A ComplaintError for each that logged an error; a FabricError for each log that cannot be read."""
        for number, one in enumerate(self._managers):
            try:
                end = one.mark()
                found = complaint_of(b"\n".join(one.since(self._written.setdefault(number, end))))
            except FabricError as err:
                yield err
                continue
            if found:
                yield ComplaintError("OpenSM logged an error", found[0])
            else:
                self._written[number] = end

    def swept(self) -> bool:
        """Whether an OpenSM of this host has swept, or logged an error, since the fabric was last read."""
        for number, one in self._here():
            try:
                (end,) = one.mark()
                said = b"\n".join(one.since(self._read.setdefault(number, (end,))))
            except FabricError:
                continue  # the next audit reports it
            if any(word in said for word in (SWEPT, *COMPLAINTS)):
                return True
            # A line may be written in two parts.
            self._read[number] = (Mark(end.inode, max(0, end.size - _LONGEST)),)
        return False

    def _here(self) -> Iterator[tuple[int, Opensm]]:
        return ((number, one) for number, one in enumerate(self._managers) if isinstance(one, Opensm))
