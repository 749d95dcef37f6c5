# SPDX-License-Identifier: Apache-2.0
"""Targets of the benchmarks: a limit for one result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Bound = Literal["at most", "at least", "under"]


@dataclass(frozen=True)
class Target:
    """A limit in ``unit`` for one result, without a unit for a ratio."""

    name: str
    bound: Bound
    limit: float
    unit: str = ""

    @property
    def text(self) -> str:
        """The limit, such as "at most 1.1" or "under 30 ms"."""
        return f"{self.bound} {self.limit:g} {self.unit}".rstrip()

    def met(self, value: float) -> bool:
        """Whether a value is within the limit."""
        if self.bound == "at least":
            return value >= self.limit
        return value <= self.limit if self.bound == "at most" else value < self.limit

    def part(self, value: float) -> float | None:
        """The value as a part of its limit: more than 1 misses the target. None: not a finite number."""
        above, below = (self.limit, value) if self.bound == "at least" else (value, self.limit)
        if below > 0:
            return above / below
        return 0.0 if self.met(value) else None


@dataclass(frozen=True)
class Judged:
    """A result and its target."""

    target: Target
    value: float

    @property
    def met(self) -> bool:
        """Whether the target is met."""
        return self.target.met(self.value)

    @property
    def line(self) -> str:
        """Result, target and verdict."""
        verdict = "met" if self.met else "MISSED"
        unit = f" {self.target.unit}" if self.target.unit else ""
        return f"{self.target.name}: {self.value:.4g}{unit}, target {self.target.text}: {verdict}"

    def document(self) -> dict[str, object]:
        """The same for JSON."""
        return {
            **described(self.target),
            "value": self.value,
            "part": self.target.part(self.value),
            "met": self.met,
        }


def described(target: Target) -> dict[str, object]:
    """A target for JSON."""
    return {
        "name": target.name,
        "target": target.text,
        "bound": target.bound,
        "limit": target.limit,
        "unit": target.unit,
    }


def at_most(limit: float, name: str, unit: str = "") -> Target:
    """An upper limit; a result equal to it meets it."""
    return Target(name, "at most", limit, unit)


def at_least(limit: float, name: str, unit: str = "") -> Target:
    """A lower limit."""
    return Target(name, "at least", limit, unit)


def under(limit: float, name: str, unit: str = "") -> Target:
    """An upper limit; a result equal to it misses it."""
    return Target(name, "under", limit, unit)
