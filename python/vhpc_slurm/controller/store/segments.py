# SPDX-License-Identifier: Apache-2.0
"""The store of VNIs of job networks: in the database of the leases, and in their transactions.

A VNI is held by one generation, then in quarantine, then free. The table's primary
key and its unique column are why no two generations can hold the same VNI, and no
generation two, whatever the code does. The components of a heterogeneous job hold one
together: it belongs to the first of them, and its quarantine begins when none of them
holds it any more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from vhpc_slurm.controller.store.errors import TAKEN_ERRORS
from vhpc_slurm.controller.store.sql import Database
from vhpc_slurm.errors import FabricError
from vhpc_slurm.model import Generation

_OF = "(generation = ? OR vni IN (SELECT vni FROM segment_share WHERE generation = ?))"
"""The VNI that a generation has, alone or with others."""


@dataclass(frozen=True)
class HeldSegment:
    """A VNI that is not free; ``left_s`` is what its quarantine still lasts, None while it is held."""

    vni: int
    generation: Generation
    left_s: float | None = None


class SegmentStore(Protocol):
    """The port.  Changes happen inside the lease store's ``transaction`` only."""

    def held(self) -> tuple[HeldSegment, ...]:
        """All VNIs that are held or in quarantine, by number."""

    def freed(self) -> dict[int, int]:
        """For each VNI that was used and is free now, when it became free; a larger number is later."""

    def of(self, generation: Generation) -> HeldSegment | None:
        """The VNI of a generation, held or in quarantine."""

    def add(self, vni: int, generation: Generation, *others: Generation) -> None:
        """Give a free VNI to a generation, and to others that share it; FabricError when it is not free."""

    def rest(self, generation: Generation, quarantine_s: float) -> None:
        """Begin the quarantine of a VNI that only this generation holds; else it only no longer holds it."""

    def hold_again(self, generation: Generation) -> None:
        """End the quarantine of a generation's VNI, because a node may use it still."""

    def age(self, elapsed_s: float) -> None:
        """Count seconds for quarantines; a VNI whose quarantine is over is free."""


class SqlSegments:
    """VNIs in the database."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def held(self) -> tuple[HeldSegment, ...]:
        """All that are not free."""
        return self._select("generation IS NOT NULL")

    def freed(self) -> dict[int, int]:
        """When each became free."""
        return dict(self._db.execute("SELECT vni, freed FROM segment WHERE generation IS NULL").fetchall())

    def of(self, generation: Generation) -> HeldSegment | None:
        """The VNI of a generation."""
        found = self._select(_OF, str(generation), str(generation))
        return found[0] if found else None

    def add(self, vni: int, generation: Generation, *others: Generation) -> None:
        """Give a free VNI to generations."""
        try:
            if self._db.execute("SELECT 1 FROM segment WHERE vni = ?", (vni,)).fetchone():
                changed = self._change(
                    "UPDATE segment SET generation = ? WHERE vni = ? AND generation IS NULL",
                    str(generation),
                    vni,
                )
            else:
                changed = self._change(
                    "INSERT INTO segment (vni, generation) VALUES (?, ?)", vni, str(generation)
                )
        except TAKEN_ERRORS as err:
            raise FabricError(f"{generation} cannot have VNI {vni}", str(err)) from err
        if changed != 1:
            raise FabricError(f"{generation} cannot have VNI {vni}", "another generation has it")
        for one in (generation, *others) if others else ():
            self._change("INSERT INTO segment_share (generation, vni) VALUES (?, ?)", str(one), vni)

    def rest(self, generation: Generation, quarantine_s: float) -> None:
        """Begin a quarantine."""
        name = str(generation)
        self._change("UPDATE segment_share SET held = 0 WHERE generation = ?", name)
        self._change(
            f"UPDATE segment SET left_s = ? WHERE {_OF} AND left_s IS NULL AND NOT EXISTS"  # noqa: S608
            " (SELECT 1 FROM segment_share WHERE segment_share.vni = segment.vni AND held)",
            quarantine_s,
            name,
            name,
        )

    def hold_again(self, generation: Generation) -> None:
        """End a quarantine without freeing the VNI."""
        name = str(generation)
        self._change("UPDATE segment_share SET held = 1 WHERE generation = ?", name)
        self._change(f"UPDATE segment SET left_s = NULL WHERE {_OF}", name, name)  # noqa: S608

    def age(self, elapsed_s: float) -> None:
        """Count seconds."""
        self._change(
            "UPDATE segment SET left_s = left_s - ? WHERE left_s IS NOT NULL", max(0.0, float(elapsed_s))
        )
        (freed,) = self._db.execute("SELECT max(freed) FROM segment").fetchone()
        if freed is not None:
            self._change(
                "UPDATE segment SET generation = NULL, left_s = NULL, freed = ? WHERE left_s <= 0", freed + 1
            )
        self._change(
            "DELETE FROM segment_share WHERE vni IN (SELECT vni FROM segment WHERE generation IS NULL)"
        )

    def _select(self, where: str, *values: object) -> tuple[HeldSegment, ...]:
        # `where` is a constant of this module, never input.
        rows = self._db.execute(
            f"SELECT vni, generation, left_s FROM segment WHERE {where} ORDER BY vni",  # noqa: S608
            values,
        ).fetchall()
        return tuple(HeldSegment(vni, Generation.parse(name), left_s) for vni, name, left_s in rows)

    def _change(self, statement: str, *values: object) -> int:
        assert self._db.in_transaction, "a change outside a transaction"
        return self._db.execute(statement, values).rowcount
