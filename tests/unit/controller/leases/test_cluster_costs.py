# SPDX-License-Identifier: Apache-2.0
"""A cluster of 1,000 jobs: a question costs as much as what has changed, a page has a limited size."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest
from cluster_site import ClusterSite, jobs
from row_counter import Counting

from vhpc_slurm.controller.api.protocol import MAX_MESSAGE
from vhpc_slurm.model import Lease, Roster

MEMBERS, TOGETHER = 1000, 32
PAGE_BYTES = 256 << 10
Result = TypeVar("Result")


class Big:
    """A cluster whose nodes know all of its members."""

    def __init__(self, folder: Path) -> None:
        self.site = ClusterSite(folder / "db")
        with self.site.store.transaction():
            self.members = [self.site.joined(job_id, f"n{job_id}") for job_id in range(1, MEMBERS + 1)]
            for lease in self.members:
                self.ask(lease, MEMBERS)
        self.counting = Counting(self.site.store.database)
        self.site.store._build(self.counting)

    def ask(self, lease: Lease, applied: int) -> Roster:
        return self.site.ask(lease, f"n{lease.generation.job_id}", applied)

    def rows(self, call: Callable[[], Result]) -> tuple[int, Result]:
        """The rows that a call reads, and its result."""
        before = self.counting.rows
        done = call()
        return self.counting.rows - before, done


@pytest.fixture
def big(tmp_path: Path) -> Big:
    return Big(tmp_path)


def test_a_question_reads_what_has_changed(big: Big) -> None:
    quiet, answer = big.rows(lambda: big.ask(big.members[0], MEMBERS))
    assert (answer, quiet <= 4) == (Roster(MEMBERS), True)
    new = [big.site.joined(2000 + number, f"x{number}") for number in range(TOGETHER)]
    for lease in big.members[::100]:
        read, answer = big.rows(partial(big.ask, lease, MEMBERS))
        assert read <= quiet + TOGETHER
        assert len(jobs(answer)) == TOGETHER
        assert len(msgspec.json.encode(answer)) < TOGETHER * 800
    big.site.service.end(new[0].generation.job_id, None)
    read, answer = big.rows(lambda: big.ask(big.members[1], MEMBERS + TOGETHER))
    assert (answer.left, read <= quiet + 1) == ((new[0].generation,), True)


def test_starts_that_wait_read_what_has_changed(big: Big) -> None:
    """Each of them looks at all members once, and then at changes only."""
    new = [big.site.joined(2000 + number, f"x{number}") for number in range(TOGETHER)]
    assert [big.site.state(lease).unaware for lease in new] == [MEMBERS + 1 + one for one in range(TOGETHER)]
    version = MEMBERS + TOGETHER
    total, _ = big.rows(lambda: [big.ask(lease, version) for lease in big.members])
    assert total <= 4 * MEMBERS
    total, states = big.rows(lambda: [big.site.state(lease) for lease in new])
    assert [state.unaware for state in states] == [1 + one for one in range(TOGETHER)]
    assert total <= 16 * TOGETHER
    aware = [
        big.site.clusters.ask(lease.generation, f"x{number}", version, ()).aware
        for number, lease in enumerate(new)
    ]
    assert aware == [(2000 + number,) for number in range(TOGETHER)]
    assert all(big.site.state(lease).settled for lease in new)


def test_a_new_member_reads_all_in_pages(big: Big) -> None:
    lease = big.site.joined(5000, "y")
    big.site.service.end(7, None)
    found: list[int] = []
    applied, pages = 0, 0
    while True:
        answer = big.site.clusters.roster(lease.generation, applied)
        size = len(msgspec.json.encode(answer))
        assert size < PAGE_BYTES * 1.5 < MAX_MESSAGE
        found += jobs(answer)
        pages += 1
        assert answer.version > applied
        applied = answer.version
        if not answer.more:
            break
    assert found == [*range(1, 7), *range(8, MEMBERS + 1), 5000]
    assert 2 <= pages <= 4
    assert applied == MEMBERS + 2
