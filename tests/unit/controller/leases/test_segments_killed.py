# SPDX-License-Identifier: Apache-2.0
"""A vhpcd that is killed while it writes leases with VNIs."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from segment_site import Site, vni
from store_backends import Place, written

from vhpc_slurm.controller.store.database import SqliteStore
from vhpc_slurm.errors import FabricError
from vhpc_slurm.model import LeaseState

WRITER = """
import sys
sys.path.insert(0, sys.argv[2])
from controller_lab import allocation
from segment_site import Site, vni
from store_backends import place_from
site = Site(place_from(sys.argv[1]))
turn = max([record.lease.generation.job_id for _, record in site.store.page(0, limit=10**6)], default=0)
while True:
    turn += 1
    lease = site.open(turn, "n1")
    site.service.take(turn, 0, "n1")
    print(turn, vni(lease), flush=True)
    if turn % 3:
        site.service.end(turn, 0)
        site.acknowledge(lease, "n1")
    else:
        site.service.end(turn, 0)
        site.now += 31
        site.acknowledge(lease, "n1")
        site.now += 31
"""


@pytest.mark.promise("net.vni")
def test_kill_9_at_any_time_loses_and_shares_no_vni(leases_at: Place) -> None:
    chance = random.Random(11)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    said = 0
    for _ in range(4):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, written(leases_at), str(Path(__file__).parent)],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert writer.stdout is not None
        lines = [writer.stdout.readline()]
        time.sleep(chance.uniform(0.0, 0.2))
        writer.send_signal(signal.SIGKILL)
        lines += writer.stdout.readlines()
        writer.wait()
        writer.stdout.close()
        site = Site(leases_at)
        for line in lines:
            if line.endswith("\n"):
                said += 1
                job_id, number = map(int, line.split())
                (record,) = site.store.of_job(job_id)
                assert vni(record.lease) == number, "what was said to be durable is there"
        held = {one.generation: one for one in site.store.segments.held() if one.left_s is None}
        live = {
            record.lease.generation: record.lease
            for _, record in site.store.page(0, limit=10**6)
            if record.lease.state is not LeaseState.RELEASED
        }
        assert held.keys() == live.keys(), "a VNI is held exactly by leases that are not released"
        for generation, lease in live.items():
            assert held[generation].vni == vni(lease)
            site.service.end(generation.job_id, 0)
            site.acknowledge(lease, "n1")
        site.now += 31
        site.service.settle()
        assert site.store.segments.held() == (), "all are free in the end"
        site.store.close()
    assert said > 4


def test_a_lease_and_its_vni_are_written_together_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(tmp_path / "db")
    monkeypatch.setattr(
        SqliteStore, "put", lambda *_: (_ for _ in ()).throw(sqlite3.OperationalError("full"))
    )
    with pytest.raises(FabricError):
        site.open(1)
    monkeypatch.undo()
    assert site.store.segments.held() == ()
    assert vni(site.open(1)) == 5000
