# SPDX-License-Identifier: Apache-2.0
"""Clusters of an older database: their members get the uid of the cluster's user."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from store_backends import ENGINES, open_at, place

from vhpc_slurm.controller.store import mariaschema, schema
from vhpc_slurm.model import ClusterMember, Generation, Segment

BEFORE = 4
"""The schema without clusters of accounts."""


def older(patch: pytest.MonkeyPatch) -> None:
    """Become a vhpcd of that schema."""
    for module in (schema, mariaschema):
        patch.setattr(module, "STEPS", module.STEPS[:BEFORE])
        patch.setattr(module, "SCHEMA_VERSION", BEFORE)


@pytest.mark.parametrize("engine", ENGINES)
def test_members_of_an_older_database_have_a_uid(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, generation = place(engine, tmp_path), Generation(7, 0, "0123abcd")
    segment = Segment(5007, "10.200.0.0/16", "fd76::/64", 7634, 0, ("192.0.2.1",))
    with monkeypatch.context() as patch:
        older(patch)
        store = open_at(found)
        with store.transaction():
            store.database.execute(
                "INSERT INTO cluster (id, uid, name, created) VALUES (?, ?, ?, ?)", (3, 2001, "a", 1.0)
            )
            store.database.execute(
                "INSERT INTO cluster_member (cluster, generation, first, guests, body)"
                " VALUES (?, ?, ?, ?, ?)",
                (3, str(generation), 0, 1, msgspec.json.encode(ClusterMember(generation, segment, ()))),
            )
        store.close()
    for _ in range(2):
        store = open_at(found)
        member = store.clusters.member(generation)
        assert member is not None
        assert member.uid == 2001
        (cluster,) = store.clusters.page(0, 2001, 10)
        assert (cluster.name, cluster.account) == ("a", None)
        with store.transaction():
            for name in ("a", "a/a", "b/a"):
                assert (
                    store.clusters.find(2001, name) or store.clusters.create(2001, name, 2.0)
                ).name == name
        assert [one.account for one in store.clusters.page(0, None, 10)] == [None, "a", "b"]
        assert [one.name for one in store.clusters.page(0, 2002, 10, accounts=("b", "c"))] == ["b/a"]
        if engine == "mariadb":  # a vhpcd that was killed in the step
            store.database.execute("DELETE FROM vhpc_schema WHERE version = 5")
        store.close()
