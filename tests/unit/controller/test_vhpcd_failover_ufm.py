# SPDX-License-Identifier: Apache-2.0
"""Two vhpcd with UFM, which cannot refuse the earlier one: nothing that it changes late stays."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from controller_lab import Munged, allocation, request, wait_for
from fabric_lab import KEYS, NOBODY, SimulatedFabric, holding, sets
from fake_ufm import TOKEN, FakeUfm, fake_ufm, settings_of
from vhpcd_fabric import HAVE_ALL, NEEDED, Ack, carries, fabric_of_its_own
from vhpcd_pair import NEEDS, Pair, running_pair

from vhpc_slurm.config.fabric import Fabric
from vhpc_slurm.model import Lease, LeaseState

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not HAVE_ALL, reason=NEEDED),
    *NEEDS,
]

SECOND_TOKEN = "tokenOfTheSecondVhpcd"


fabric = fabric_of_its_own


@pytest.fixture
def ufm(tmp_path: Path, fabric: SimulatedFabric) -> Iterator[FakeUfm]:
    with fake_ufm(tmp_path, fabric) as started:
        started.second_token = SECOND_TOKEN
        yield started
        started.arrives.set()


@pytest.fixture
def pair(
    tmp_path: Path, daemon: Munged, run_dir: str, fabric: SimulatedFabric, ufm: FakeUfm
) -> Iterator[Pair]:
    """Each with a token of its own, so that UFM sees whose change it is."""
    fabrics = []
    for number, token in enumerate((TOKEN, SECOND_TOKEN)):
        folder = tmp_path / f"token-{number}"
        folder.mkdir()
        often: dict[str, Any] = {"sweep_interval_s": 0.0, "audit_interval_s": 0.3, "apply_timeout_s": 5}
        fabrics.append(Fabric(pkey_last=0x10FF, **often, **settings_of(ufm, folder, token)))
    library = {name: value for name, value in fabric.environment.items() if name not in os.environ}
    with running_pair(tmp_path, daemon, run_dir, fabrics, library) as found:
        yield found


class Start(threading.Thread):
    """A job that starts on two nodes, as long as that takes."""

    def __init__(self, pair: Pair, job_id: int) -> None:
        super().__init__(daemon=True)
        self._pair, self._job_id = pair, job_id
        self.lease: Lease | None = None
        self.start()

    def run(self) -> None:
        client = self._pair.client
        self.lease = client.open_generation(request(self._job_id), allocation("n1", "n2"))

    def ready(self) -> Lease:
        self.join(60)
        assert self.lease is not None, "no lease"
        assert self.lease.state is LeaseState.READY
        return self.lease


def end(pair: Pair, lease: Lease) -> None:
    pair.client.ending(lease.generation.job_id, 0)
    for node in ("n1", "n2"):
        pair.client.acknowledge(Ack(lease.generation, node))


def removals(ufm: FakeUfm, pkey: int) -> int:
    """How often ports were removed from a key."""
    return sum(method == "DELETE" and f"/{pkey:#x}" in path for method, path in ufm.asked)


def writes_of_first(ufm: FakeUfm) -> int:
    return ufm.writers.count(TOKEN)


@pytest.mark.promise("fabric.fence")
def test_keys_at_ufm_are_those_of_leases_after_a_takeover(
    pair: Pair, ufm: FakeUfm, fabric: SimulatedFabric
) -> None:
    first = Start(pair, 1).ready()
    starting = [Start(pair, job_id) for job_id in (2, 3, 4)]
    wait_for(lambda: writes_of_first(ufm) > 2, "nothing starts")
    pair.first.kill()
    leases = [first, *(one.ready() for one in starting)]
    assert {one.network.pkey for one in leases} == set(KEYS)
    carries(fabric, holding(*((pkey, 2) for pkey in KEYS)))
    for one in leases:
        end(pair, one)
    carries(fabric, NOBODY)
    assert pair.second.times_active() == 1


@pytest.mark.promise("fabric.fence")
def test_a_change_that_arrives_after_the_takeover_is_undone(
    pair: Pair, ufm: FakeUfm, fabric: SimulatedFabric
) -> None:
    Start(pair, 1).ready()
    ufm.fail("POST", "late", pkey=0x1001)
    second = Start(pair, 2)
    wait_for(lambda: ufm.on_the_way == 1, "nothing is on the way")
    pair.first.kill()
    lease = second.ready()
    end(pair, lease)
    wait_for(lambda: f"{lease.generation} released" in pair.second.log, "not released")
    assert sets(fabric) == holding((0x1000, 2))
    before = removals(ufm, 0x1001)
    ufm.arrives.set()  # the ports of a job that has ended get its key again
    wait_for(lambda: ufm.on_the_way == 0, "it does not arrive")
    wait_for(lambda: removals(ufm, 0x1001) > before, "nobody removes it")
    carries(fabric, holding((0x1000, 2)))
    assert Start(pair, 3).ready().network.pkey == 0x1002, "a key that was late is still reserved"


@pytest.mark.promise("fabric.fence")
def test_a_thawed_vhpcd_sends_no_change_to_ufm(pair: Pair, ufm: FakeUfm, fabric: SimulatedFabric) -> None:
    first = Start(pair, 1).ready()
    ufm.fail("POST", "late", pkey=0x1001)
    second = Start(pair, 2)
    wait_for(lambda: ufm.on_the_way == 1, "nothing is on the way")
    pair.first.signal(signal.SIGSTOP)
    wait_for(lambda: pair.second.times_active() == 1, "no takeover")
    second.ready()
    end(pair, first)
    carries(fabric, holding((0x1001, 2)))
    before = writes_of_first(ufm)
    ufm.arrives.set()
    pair.first.signal(signal.SIGCONT)
    wait_for(lambda: pair.first.log.count("listens as a standby") == 2, "it goes on")
    third = Start(pair, 3).ready()
    assert third.network.pkey == 0x1002
    carries(fabric, holding((0x1001, 2), (0x1002, 2)))
    assert writes_of_first(ufm) == before
    assert sets(fabric) == holding((0x1001, 2), (0x1002, 2))
