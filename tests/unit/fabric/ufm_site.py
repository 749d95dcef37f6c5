# SPDX-License-Identifier: Apache-2.0
"""vhpcd's parts with UFM in the place of the subnet manager."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from controller_lab import Alone, allocation, identity, request
from fabric_lab import GUIDS
from fake_ufm import TOKEN, FakeUfm, fake_ufm

from vhpc_slurm.controller.store.database import SqliteStore
from vhpc_slurm.fabric import ufm_rest
from vhpc_slurm.fabric.backend import KeyPolicy
from vhpc_slurm.fabric.keys import KeySnapshot
from vhpc_slurm.fabric.numbers import KeyPool
from vhpc_slurm.fabric.readback import Readback
from vhpc_slurm.fabric.ufm_client import UfmClient
from vhpc_slurm.fabric.ufm_rest import UfmRest
from vhpc_slurm.model import LeaseRecord

MARK = 0x0FFF


class Site:
    """vhpcd's own parts, with UFM in the place of the subnet manager."""

    def __init__(
        self,
        ufm: FakeUfm,
        folder: Path,
        readback: Readback | None = None,
        *,
        database: str = "db",
        reserved: frozenset[int] = frozenset(),
        timeout_s: float = 5.0,
        request_timeout_s: float = 5.0,
    ) -> None:
        token = folder / "token"
        token.write_text(TOKEN)
        token.chmod(0o600)
        self.store = SqliteStore(folder / database)
        self.client = UfmClient(ufm.url, token, str(ufm.ca), request_timeout_s)
        self.backend = UfmRest(
            KeyPolicy(KeyPool(0x1000, 0x1003, reserved)),
            self.client,
            readback,
            self.store.keys.knows,
            mark_pkey=MARK,
            timeout_s=timeout_s,
        )
        self.service = Alone(self.store, self.backend, reserve_mib=0, quarantine_s=30.0)

    @property
    def snapshot(self) -> KeySnapshot:
        return self.store.keys.snapshot()

    def open(self, job_id: int, *nodes: str) -> LeaseRecord:
        return self.service.open(request(job_id), allocation(*nodes), identity(0))

    def states(self) -> dict[int, str]:
        return {
            assignment.generation.job_id: assignment.state.value for assignment in self.snapshot.assignments
        }


@pytest.fixture(name="_soon_again", autouse=True)
def soon_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """vhpcd repeats requests that UFM has accepted and not done sooner than on a site."""
    monkeypatch.setattr(ufm_rest, "AGAIN_S", 0.4)


@pytest.fixture(name="ufm")
def ufm_server(tmp_path: Path) -> Iterator[FakeUfm]:
    with fake_ufm(tmp_path) as started:
        yield started


@pytest.fixture(name="site")
def ufm_site(ufm: FakeUfm, tmp_path: Path) -> Site:
    return Site(ufm, tmp_path)


ALICE = {GUIDS[0], GUIDS[1]}
