# SPDX-License-Identifier: Apache-2.0
"""The store of named clusters and of their members: in the database of the leases, and in its transactions.

Each change of a member that has joined gives its cluster the next version, which the member's row gets: what
has changed since a version are the rows above it. A cluster ends with its last member, unless it is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import msgspec

from vhpc_slurm.controller.store.sql import Database, among
from vhpc_slurm.errors import FabricError
from vhpc_slurm.model import ClusterMember, Generation
from vhpc_slurm.options import cluster_account
from vhpc_slurm.undecodable import UNDECODABLE


@dataclass(frozen=True)
class StoredCluster:
    """A cluster in the database.

    Attributes:
        uid: user who created it.
        kept: it stays without members, until ``kept_until`` (None: without limit).
        account: account that owns it; None if the user owns it.
    """

    serial: int
    uid: int
    name: str
    created: float
    version: int
    kept: bool
    kept_until: float | None
    account: str | None


@dataclass(frozen=True)
class StoredMember:
    """A member of a user; ``joined`` and ``changed`` are versions of its cluster, ``left_at`` is a time."""

    serial: int
    cluster: int
    generation: Generation
    first: int
    guests: int
    joined: int | None
    changed: int
    left_at: float | None
    uid: int
    member: ClusterMember
    size: int

    @property
    def is_present(self) -> bool:
        """Whether it has joined, and has not left."""
        return self.joined is not None and self.left_at is None


class ClusterStore(Protocol):
    """The port.  Changes happen inside the lease store's ``transaction`` only."""

    @property
    def undone(self) -> int:
        """How many transactions were undone: what was computed from rows before may be wrong."""

    def take_changed(self) -> frozenset[int]:
        """Clusters that have changed since the last call; any thread may ask."""

    def find(self, uid: int, name: str) -> StoredCluster | None:
        """A cluster of a user, or of the account in the name."""

    def get(self, serial: int) -> StoredCluster | None:
        """A cluster."""

    def page(
        self, after: int, uid: int | None, limit: int, accounts: Collection[str] = ()
    ) -> tuple[StoredCluster, ...]:
        """Clusters above ``after`` of a user and some accounts, or of all, in the order of their numbers."""

    def kept(self, cluster: StoredCluster) -> int:
        """How many clusters of the same user or account are kept."""

    def create(self, uid: int, name: str, now: float) -> StoredCluster:
        """Make a cluster without members; with an account in its name it is one of that account."""

    def keep(self, serial: int, until: float | None) -> None:
        """Keep a cluster without members until a time; None: without limit."""

    def remove(self, serial: int) -> None:
        """Delete a cluster and its members."""

    def remove_expired(self, now: float) -> None:
        """Delete clusters whose time is over and that have no members."""

    def count(self, serial: int) -> tuple[int, int]:
        """How many members a cluster has, also those that have not joined yet, and their guests."""

    def taken(self, serial: int, since: float) -> tuple[tuple[int, int], ...]:
        """(first, guests) of members that are there, or have left after a time."""

    def add(self, serial: int, member: ClusterMember, guests: int, uid: int) -> None:
        """Add a member that the others do not know yet; ``uid`` is that of its job."""

    def member(self, generation: Generation) -> StoredMember | None:
        """A member by its first component."""

    def members(self, serial: int, after: int = 0, limit: int = 1 << 62) -> tuple[StoredMember, ...]:
        """Members that have not left, above a serial number, in the order of these numbers."""

    def begun(self, generations: Sequence[Generation]) -> dict[Generation, float]:
        """When the jobs of some members began, in seconds since the epoch."""

    def changes(self, serial: int, version: int, limit: int = 1 << 62) -> tuple[StoredMember, ...]:
        """Members that have changed since a version, also those that have left, in the order of changes."""

    def join(self, generation: Generation, host_public: str, user_public: str) -> None:
        """A member joins, with the public keys of its guests."""

    def set_gone(self, generation: Generation, ranks: Collection[int]) -> None:
        """These guests of a member are gone, and no others."""

    def leave(self, generation: Generation, now: float) -> None:
        """A member leaves; another generation changes nothing."""

    def prune(self, serial: int, before: float, version: int) -> None:
        """Delete members that left before a time and before a version."""


_COLUMNS = "id, cluster, generation, first, guests, joined, changed, left_at, gone, uid, body"
_OF_USER = "uid = ? AND account IS NULL"
_CLUSTER = "id, uid, name, created, version, kept, kept_until, account"


class SqlClusters:
    """Clusters in the database."""

    def __init__(self, db: Database, damaged: Callable[[str], FabricError]) -> None:
        """``damaged`` makes the error of a row that cannot be read."""
        self._db = db
        self._damaged = damaged
        self._undone = 0
        self._changed: set[int] = set()

    @property
    def undone(self) -> int:
        """How many transactions were undone."""
        return self._undone

    def forget(self) -> None:
        """Count a transaction that was undone."""
        self._undone += 1

    def take_changed(self) -> frozenset[int]:
        """Clusters that have changed."""
        found = set()
        while self._changed:  # the database thread only adds to it
            found.add(self._changed.pop())
        return frozenset(found)

    def find(self, uid: int, name: str) -> StoredCluster | None:
        """A cluster of a user or account."""
        if account := cluster_account(name):
            return next(iter(self._clusters("account = ? AND name = ?", account, name)), None)
        return next(iter(self._clusters(f"{_OF_USER} AND name = ?", uid, name)), None)

    def get(self, serial: int) -> StoredCluster | None:
        """A cluster."""
        return next(iter(self._clusters("id = ?", serial)), None)

    def page(
        self, after: int, uid: int | None, limit: int, accounts: Collection[str] = ()
    ) -> tuple[StoredCluster, ...]:
        """Clusters above ``after``."""
        if uid is None:
            return self._clusters("id > ? ORDER BY id LIMIT ?", after, limit)
        whose = " OR ".join((f"({_OF_USER})", *("account = ?" for _ in accounts)))
        return self._clusters(f"id > ? AND ({whose}) ORDER BY id LIMIT ?", after, uid, *accounts, limit)

    def kept(self, cluster: StoredCluster) -> int:
        """How many are kept."""
        if cluster.account is not None:
            return len(self._clusters("kept = 1 AND account = ?", cluster.account))
        return len(self._clusters(f"kept = 1 AND {_OF_USER}", cluster.uid))

    def create(self, uid: int, name: str, now: float) -> StoredCluster:
        """Make a cluster."""
        self._change(
            "INSERT INTO cluster (uid, name, created, account) VALUES (?, ?, ?, ?)",
            *(uid, name, now, cluster_account(name) or None),
        )
        made = self.find(uid, name)
        assert made is not None
        return made

    def keep(self, serial: int, until: float | None) -> None:
        """Keep a cluster."""
        self._change("UPDATE cluster SET kept = 1, kept_until = ? WHERE id = ?", until, serial)

    def remove(self, serial: int) -> None:
        """Delete a cluster."""
        self._change("DELETE FROM cluster WHERE id = ?", serial)
        self._changed.add(serial)

    def remove_expired(self, now: float) -> None:
        """Delete clusters whose time is over."""
        for one in self._clusters("kept = 1 AND kept_until IS NOT NULL AND kept_until < ?", now):
            if not self.members(one.serial, limit=1):
                self.remove(one.serial)

    def count(self, serial: int) -> tuple[int, int]:
        """Members and guests."""
        count, guests = self._db.execute(
            "SELECT count(*), sum(guests) FROM cluster_member WHERE cluster = ? AND left_at IS NULL",
            (serial,),
        ).fetchone()
        return int(count), int(guests or 0)

    def taken(self, serial: int, since: float) -> tuple[tuple[int, int], ...]:
        """Ranges of addresses."""
        rows = self._db.execute(
            "SELECT first, guests FROM cluster_member"
            " WHERE cluster = ? AND (left_at IS NULL OR left_at > ?) ORDER BY first",
            (serial, since),
        )
        return tuple((first, guests) for first, guests in rows)

    def add(self, serial: int, member: ClusterMember, guests: int, uid: int) -> None:
        """Add a member."""
        self._change(
            "INSERT INTO cluster_member (cluster, generation, first, guests, uid, body)"
            " VALUES (?, ?, ?, ?, ?, ?)",
            serial,
            str(member.generation),
            member.segment.first,
            guests,
            uid,
            msgspec.json.encode(member),
        )

    def member(self, generation: Generation) -> StoredMember | None:
        """A member."""
        return next(iter(self._members("generation = ?", str(generation))), None)

    def members(self, serial: int, after: int = 0, limit: int = 1 << 62) -> tuple[StoredMember, ...]:
        """Members that have not left."""
        where = "cluster = ? AND left_at IS NULL AND id > ? ORDER BY id LIMIT ?"
        return self._members(where, serial, after, limit)

    def begun(self, generations: Sequence[Generation]) -> dict[Generation, float]:
        """Times of members."""
        names = [str(one) for one in generations]
        rows = self._db.execute(
            f"SELECT generation, created FROM lease WHERE generation IN {among(names)}",  # noqa: S608 - only ?
            names,
        )
        return {Generation.parse(name): created for name, created in rows.fetchall()}

    def changes(self, serial: int, version: int, limit: int = 1 << 62) -> tuple[StoredMember, ...]:
        """Members that have changed."""
        return self._members("cluster = ? AND changed > ? ORDER BY changed LIMIT ?", serial, version, limit)

    def join(self, generation: Generation, host_public: str, user_public: str) -> None:
        """A member joins."""
        one = self.member(generation)
        if one is None or one.joined is not None or one.left_at is not None:
            return
        body = msgspec.structs.replace(one.member, host_public=host_public, user_public=user_public, gone=())
        version = self._next(one.cluster)
        self._change(
            "UPDATE cluster_member SET joined = ?, changed = ?, body = ? WHERE id = ?",
            version,
            version,
            msgspec.json.encode(body),
            one.serial,
        )

    def set_gone(self, generation: Generation, ranks: Collection[int]) -> None:
        """These guests of a member are gone."""
        one, gone = self.member(generation), sorted(set(ranks))
        if one is None or one.left_at is not None or tuple(gone) == one.member.gone:
            return
        self._change("UPDATE cluster_member SET gone = ? WHERE id = ?", ",".join(map(str, gone)), one.serial)
        if one.joined is not None:
            version = self._next(one.cluster)
            self._change("UPDATE cluster_member SET changed = ? WHERE id = ?", version, one.serial)

    def leave(self, generation: Generation, now: float) -> None:
        """A member leaves."""
        row = self._db.execute(
            "SELECT id, cluster, joined FROM cluster_member WHERE generation = ? AND left_at IS NULL",
            (str(generation),),
        ).fetchone()
        if row is None:
            return
        serial, cluster, joined = row
        # The others do not know a member that has never joined.
        version = 0 if joined is None else self._next(cluster)
        self._change("UPDATE cluster_member SET left_at = ?, changed = ? WHERE id = ?", now, version, serial)
        self._changed.add(cluster)
        stays = "kept = 1 AND (kept_until IS NULL OR kept_until > ?)"
        if not self.members(cluster, limit=1) and not self._clusters(f"id = ? AND {stays}", cluster, now):
            self.remove(cluster)

    def prune(self, serial: int, before: float, version: int) -> None:
        """Delete members that have left."""
        self._change(
            "DELETE FROM cluster_member WHERE cluster = ? AND left_at < ? AND changed <= ?",
            serial,
            before,
            version,
        )

    def _next(self, serial: int) -> int:
        """The next version of a cluster."""
        self._change("UPDATE cluster SET version = version + 1 WHERE id = ?", serial)
        self._changed.add(serial)
        (version,) = self._db.execute("SELECT version FROM cluster WHERE id = ?", (serial,)).fetchone()
        return int(version)

    def _clusters(self, where: str, *values: object) -> tuple[StoredCluster, ...]:
        # `where` is made of constants of this module, never of input.
        rows = self._db.execute(f"SELECT {_CLUSTER} FROM cluster WHERE {where}", values).fetchall()  # noqa: S608
        return tuple(
            StoredCluster(serial, uid, name, created, version, bool(kept), kept_until, account)
            for serial, uid, name, created, version, kept, kept_until, account in rows
        )

    def _members(self, where: str, *values: object) -> tuple[StoredMember, ...]:
        rows = self._db.execute(
            f"SELECT {_COLUMNS} FROM cluster_member WHERE {where}",  # noqa: S608 - as above
            values,
        ).fetchall()
        try:
            return tuple(_stored(*row) for row in rows)
        except UNDECODABLE as err:
            raise self._damaged(f"a member of a cluster cannot be read: {err}") from err

    def _change(self, statement: str, *values: object) -> None:
        assert self._db.in_transaction, "a change outside a transaction"
        self._db.execute(statement, values)


def _stored(
    serial: int,
    cluster: int,
    name: str,
    first: int,
    guests: int,
    joined: int | None,
    changed: int,
    left_at: float | None,
    gone: str,
    uid: int,
    body: bytes,
) -> StoredMember:
    generation, member = Generation.parse(name), _member(gone, body)
    return StoredMember(
        serial, cluster, generation, first, guests, joined, changed, left_at, uid, member, len(body)
    )


@lru_cache(maxsize=4096)
def _member(gone: str, body: bytes) -> ClusterMember:
    """A stored member; cached, since all nodes of a cluster ask for the same ones."""
    ranks = tuple(int(rank) for rank in gone.split(",")) if gone else ()
    return msgspec.structs.replace(msgspec.json.decode(body, type=ClusterMember), gone=ranks)
