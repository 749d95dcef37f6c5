# SPDX-License-Identifier: Apache-2.0
"""Bytes of checkpoints: as expected while one is made, and as measured when it is valid."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from vhpc_slurm.controller.store.sql import Database
from vhpc_slurm.model import CheckpointState, SavedNode, saved_bytes
from vhpc_slurm.record import Record


class Sized(Record, frozen=True):
    """A checkpoint that is being made, or is valid, and its bytes."""

    serial: int
    uid: int
    account: str
    job_id: int
    state: CheckpointState
    bytes: int


class SizeStore(Protocol):
    """The port; it belongs to ``CheckpointStore``."""

    def put(self, serial: int, count: int) -> None:
        """Store the bytes of a checkpoint, in place of earlier ones."""

    def all(self) -> tuple[Sized, ...]:
        """All checkpoints that are being made or are valid, oldest first."""


class SqlSizes:
    """Sizes in the database."""

    def __init__(self, db: Database, saved: Callable[[int], tuple[SavedNode, ...]]) -> None:
        """``saved`` has what nodes have saved for a checkpoint: for those of a vhpcd that stored no sizes."""
        self._db, self._saved = db, saved

    def put(self, serial: int, count: int) -> None:
        """Store the bytes of a checkpoint."""
        assert self._db.in_transaction, "a change outside a transaction"
        self._db.execute(
            "INSERT INTO checkpoint_size (checkpoint, bytes) VALUES (?, ?)"
            " ON CONFLICT DO UPDATE SET bytes = excluded.bytes",
            (serial, count),
        )

    def all(self) -> tuple[Sized, ...]:
        """All that have files, or will have them."""
        rows = self._db.execute(
            "SELECT id, uid, account, job_id, state, bytes FROM checkpoint"
            " LEFT JOIN checkpoint_size ON checkpoint_size.checkpoint = checkpoint.id"
            " WHERE state IN ('holding', 'saving', 'valid') ORDER BY id"
        ).fetchall()
        return tuple(
            Sized(
                serial,
                uid,
                account,
                job_id,
                CheckpointState(state),
                saved_bytes(self._saved(serial)) if count is None else count,
            )
            for serial, uid, account, job_id, state, count in rows
        )
