# SPDX-License-Identifier: Apache-2.0
"""A fabric, and a database of vhpcd that is not the one its keys are from."""

from __future__ import annotations

from pathlib import Path

import pytest
from backend_site import Site, backend_site
from fabric_lab import (
    HAVE_SIMULATOR,
    NEEDED,
    NOBODY,
    SimulatedFabric,
    holding,
    sets,
)

from vhpc_slurm.errors import FabricError
from vhpc_slurm.fabric.keys import KeySnapshot
from vhpc_slurm.fabric.smp import FabricReader

site = backend_site

pytestmark = [pytest.mark.skipif(not HAVE_SIMULATOR, reason=NEEDED), pytest.mark.long]


def test_an_empty_database_removes_no_key(
    site: Site, fabric: SimulatedFabric, reader: FabricReader, tmp_path: Path
) -> None:
    site.open(1, "n1")
    written = fabric.partitions.read_bytes()
    empty = Site(fabric, reader, tmp_path / "other")
    for text, says in (
        (written, "has epoch 1 of another"),
        (written.replace(b"# vhpcd epoch", b"# epoch"), "it has keys, and no epoch"),
    ):
        fabric.replace(text)
        for attempt in (empty.backend.validate, empty.backend.apply, empty.backend.repair):
            with pytest.raises(FabricError, match=says):
                attempt(empty.store.keys.snapshot())
        with pytest.raises(FabricError, match=says):
            empty.open(2, "n1", "n2")
        empty.service.end(2, 0)
        assert fabric.partitions.read_bytes() == text
    fabric.sweep()
    assert sets(fabric) == holding((0x1000, 1))
    empty.backend.apply(KeySnapshot(0), force=True)
    assert sets(fabric) == NOBODY


def test_a_copy_of_yesterday_s_database_writes_nothing(
    site: Site, fabric: SimulatedFabric, reader: FabricReader, tmp_path: Path
) -> None:
    site.open(1, "n1")
    site.store._db.execute("VACUUM INTO ?", (str(tmp_path / "yesterday"),))
    site.open(2, "n1", "n2")
    old = Site(fabric, reader, tmp_path / "yesterday")
    for job_id in (3, 4):
        with pytest.raises(FabricError, match="restored from a copy"):
            old.open(job_id, "n1")
    with pytest.raises(FabricError, match="restored from a copy"):
        old.backend.repair(old.store.keys.snapshot())
    assert sets(fabric) == holding((0x1000, 1), (0x1001, 2))


def test_a_restarted_vhpcd_knows_its_file(
    site: Site, fabric: SimulatedFabric, reader: FabricReader, tmp_path: Path
) -> None:
    site.open(1, "n1")
    site.open(2, "n1", "n2")
    site.service.end(1, 0)
    again = Site(fabric, reader, tmp_path / "db")
    again.backend.validate(again.store.keys.snapshot())
    again.open(3, "n1")
    assert sets(fabric) == holding((0x1001, 2), (0x1002, 1))


def test_keys_lost_from_the_database_stay_on_the_fabric(site: Site) -> None:
    for job_id in (1, 2, 3):
        site.open(job_id, "n1")
    snapshot = site.store.keys.snapshot()
    shrunk = KeySnapshot(snapshot.epoch, snapshot.assignments[1:], {}, snapshot.tag)
    with pytest.raises(FabricError, match="does not know 1 keys"):
        site.backend.apply(shrunk)
    site.backend.apply(
        KeySnapshot(snapshot.epoch, snapshot.assignments[1:], {0x1000: snapshot.epoch}, snapshot.tag)
    )
