# SPDX-License-Identifier: Apache-2.0
"""A full disk under vhpcd's database: vhpcd reports it in one line, and keeps all that it has confirmed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import mariadb_server
import pytest
from controller_lab import HAVE_MUNGED, Munged, allocation, request, stop
from mariadb_server import Server
from small_fs import fill, mounted
from stepd import needs_root
from vhpcd_process import Vhpcd, make

from vhpc_slurm.controller.client import ControllerClient
from vhpc_slurm.errors import FabricError
from vhpc_slurm.model import LeaseState

pytestmark = [needs_root, pytest.mark.skipif(not HAVE_MUNGED, reason="needs munged: apt install munge")]
FULL = r"vhpcd cannot use (?:its|the) database .*full \(make room on its disk\)"
SERVER_PAGES = 160 << 8
"""160 MiB: a new server has 80 MiB of files."""


@pytest.fixture
def vhpcd(tmp_path: Path, daemon: Munged) -> Iterator[Vhpcd]:
    found = make(tmp_path, daemon)
    with mounted(Path(found.config.controller.database).parent, pages=512):
        found.start()
        yield found
        if found.process is not None:
            stop(found.process)


def confirmed(client: ControllerClient, first: int) -> tuple[int, str]:
    """Open leases until one is refused; returns its job, and the line."""
    for job in range(first, first + 2000):
        try:
            client.open_generation(request(job), allocation())
        except FabricError as err:
            return job, err.line()
    raise AssertionError("the disk did not become full")


def refused_and_continued(vhpcd: Vhpcd, folder: Path, pages: int = 0) -> int:
    """Fill the disk of a database without leases; the number of jobs when there is space again."""
    client = vhpcd.client
    client.open_generation(request(1), allocation())
    client.lease(1, 0, "n1", 5)
    others = fill(folder, pages=pages)
    job, line = confirmed(client, 2)
    assert re.search(FULL, line)
    jobs = [record.lease.generation.job_id for record in client.leases()]
    assert jobs == list(range(1, job)), "what was confirmed is there, and only that"
    others.unlink()
    assert client.open_generation(request(job), allocation()).state is LeaseState.READY
    client.ending(1, 0)
    (first,) = client.leases(job_id=1)
    assert first.lease.state is LeaseState.ENDING
    assert re.search(FULL, vhpcd.log)
    assert "Traceback" not in vhpcd.log
    return job


@pytest.mark.promise("db.full")
def test_a_full_disk_refuses_starts_and_loses_nothing(vhpcd: Vhpcd) -> None:
    job = refused_and_continued(vhpcd, Path(vhpcd.config.controller.database).parent, pages=8)
    vhpcd.kill()
    vhpcd.start()
    assert len(vhpcd.client.leases()) == job


@pytest.mark.promise("db.full")
def test_a_vhpcd_killed_on_a_full_disk_starts_with_space(vhpcd: Vhpcd) -> None:
    others = fill(Path(vhpcd.config.controller.database).parent, pages=8)
    job, _ = confirmed(vhpcd.client, 1)
    vhpcd.kill()
    others.unlink()
    vhpcd.start()
    assert len(vhpcd.client.leases()) == job - 1


@pytest.fixture
def server(run_dir: str) -> Iterator[Server]:
    """A MariaDB server whose files have a small file system of their own."""
    with mounted(Path(run_dir) / "db", SERVER_PAGES) as folder:
        found = Server(folder).start()
        yield found
        found.stop()


@pytest.mark.promise("db.full")
@pytest.mark.skipif(not mariadb_server.HAVE_SERVER, reason=mariadb_server.WHY_NOT)
def test_a_server_on_a_full_disk_loses_nothing(tmp_path: Path, daemon: Munged, server: Server) -> None:
    """vhpcd and server are not restarted."""
    vhpcd = make(tmp_path, daemon, database=server.database()).start()
    try:
        refused_and_continued(vhpcd, server.folder)
    finally:
        assert vhpcd.process is not None
        stop(vhpcd.process)
