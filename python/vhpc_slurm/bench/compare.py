# SPDX-License-Identifier: Apache-2.0
"""Native and guest figures of a metric, and their ratio.  Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from vhpc_slurm.bench.catalogue import Metric


@dataclass(frozen=True)
class Series:
    """Figures of several rounds: their median, the lowest and the highest."""

    values: tuple[float, ...]
    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Series:
        """The series of at least one figure."""
        return Series(tuple(values), median(values), min(values), max(values))


@dataclass(frozen=True)
class Comparison:
    """Native and guest figures of the rounds that have both.

    ``efficiency`` is the ratio of the medians, ``low`` and ``high`` are the
    lowest and the highest ratio of a round.  All are oriented so that 1.0 is
    native speed and a lower value is slower, for rates as for times.
    """

    metric: Metric
    native: Series
    guest: Series
    efficiency: float
    low: float
    high: float


def figure(value: float) -> str:
    """A positive number for people: three significant digits or the whole number, no exponent unless tiny."""
    if value < 1e-4:
        return f"{value:.2g}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}"


def part(value: float) -> str:
    """An efficiency for people: two decimals, three significant digits below 0.1."""
    return f"{value:.2f}" if value >= 0.1 else figure(value)


def ratio(metric: Metric, native: float, guest: float) -> float:
    """Guest speed as a part of native speed: guest/native for rates, native/guest for times."""
    return guest / native if metric.higher_is_better else native / guest


def compare(metric: Metric, rounds: Sequence[tuple[float, float]]) -> Comparison:
    """Compare the (native, guest) figures of at least one round; all figures are positive."""
    native = Series.of([pair[0] for pair in rounds])
    guest = Series.of([pair[1] for pair in rounds])
    ratios = [ratio(metric, *pair) for pair in rounds]
    return Comparison(
        metric, native, guest, ratio(metric, native.median, guest.median), min(ratios), max(ratios)
    )
