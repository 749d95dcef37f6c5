# SPDX-License-Identifier: Apache-2.0
"""Values that grow in a campaign are found, and values that only vary are not."""

from __future__ import annotations

import pytest
from campaign.trends import FLAT, GROWS, Sample, points, thirds, trends

pytestmark = pytest.mark.lab


def run_of(values: list[float], unit: str = "MiB", *, restarted: int = 0) -> str:
    """The verdict over a daemon that held this at equal distances; it was another one until a sample."""
    samples = [
        Sample(5.0 * i, i, {("vhpcd", unit): value}, {"vhpcd": 0.1 * i}, {"vhpcd": (i >= 3 * restarted,)})
        for i, value in enumerate(value for value in values for _ in range(3))
    ]
    return trends(samples)[0].verdict


@pytest.mark.promise("campaign.endurance")
@pytest.mark.vlab_itself
def test_a_daemon_that_grows_with_jobs_is_found() -> None:
    filling = [20.0] * 10
    assert run_of([*filling, *[50.0] * 21]) == FLAT
    # medians of 50.9 and 52.9 MiB
    assert run_of([*filling, *[50.0 + 0.2 * i for i in range(21)]]) == FLAT
    assert run_of([*filling, *[50.0 + 0.4 * i for i in range(21)]]) == GROWS
    assert run_of([*filling, *[5.0 + 0.05 * i for i in range(21)]]) == FLAT  # less than 1 MiB
    assert run_of([*filling, *[12.0] * 10, *[16.0] * 11], "descriptors") == GROWS
    # one sample in a busy moment is no trend
    assert run_of([*filling, *[12.0] * 10, *[16.0] * 3, *[12.0] * 8], "descriptors") == FLAT
    # with the jobs of the moment
    busy = [20.0, 50.0, 30.0, 40.0, 60.0]
    assert run_of([*filling, *busy * 2, *[one + 10 for one in busy * 2], 50.0], "files") == FLAT
    assert run_of([*filling, *busy * 2, *[one + 30 for one in busy * 2], 70.0], "files") == GROWS
    assert run_of([*filling, *[9.0] * 21], restarted=9) == FLAT
    assert run_of([*filling, *[9.0] * 21], restarted=15) == "restarted"
    assert run_of([50.0] * 9) == "too few samples"


@pytest.mark.vlab_itself
def test_a_database_may_grow_with_the_leases_that_it_holds() -> None:
    def verdicts(kib: tuple[float, ...], leases: tuple[float, ...]) -> dict[str, str]:
        name = "vhpcd's database"
        samples = [
            Sample(5.0 * i, i, {(name, "KiB"): kib[i // 30], (name, "leases"): leases[i // 30]}, {}, {})
            for i in range(90)
        ]
        return {row.unit: row.verdict for row in trends(samples)}

    assert verdicts((900, 1000, 1110), (90, 100, 109)) == {"KiB per lease": FLAT, "leases": FLAT}
    # the file stays as large as it was
    assert verdicts((900, 1000, 1000), (90, 100, 20)) == {"KiB per lease": FLAT, "leases": FLAT}
    assert verdicts((900, 1000, 1300), (90, 100, 100)) == {"KiB per lease": GROWS, "leases": FLAT}
    assert verdicts((900, 1000, 3000), (90, 100, 300)) == {"KiB per lease": FLAT, "leases": GROWS}


@pytest.mark.vlab_itself
def test_cpu_time_for_a_job_is_judged_and_not_that_of_the_run() -> None:
    def verdict(*ms: float, slower: bool = False) -> str:
        cpu_s, at_s, samples = 0.0, 0.0, []
        for i in range(91):
            samples.append(Sample(at_s, 10 * i, {}, {"slurmctld": cpu_s}, {"slurmctld": (7,)}))
            cpu_s += 10 * ms[min(i // 30, 2)] / 1e3
            at_s += 30.0 if slower and i >= 60 else 15.0
        return trends(samples)[0].verdict

    assert verdict(100, 20, 20) == FLAT
    assert verdict(5, 20, 24) == FLAT
    assert verdict(5, 20, 26) == GROWS
    assert verdict(5, 2, 3.5) == FLAT  # not by 2 ms
    assert verdict(5, 20, 40, slower=True) == FLAT  # half of the jobs, and as much in a minute
    assert verdict(5, 20, 60, slower=True) == GROWS


@pytest.mark.vlab_itself
def test_samples_are_divided_by_jobs_and_not_by_time() -> None:
    samples = [Sample(float(i), jobs, {}, {}, {}) for i, jobs in enumerate((1, 2, 3, 4, 5, 50, 100, 150))]
    middle, last = thirds(samples)
    assert [sample.jobs for sample in middle] == [50]
    assert [sample.jobs for sample in last] == [100, 150]
    assert [sample.jobs for sample in points(samples, 4)] == [2, 4, 50, 150]
