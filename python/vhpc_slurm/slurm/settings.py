# SPDX-License-Identifier: Apache-2.0
"""Slurm's configuration, parsed from ``scontrol show config``.  Pure."""

from __future__ import annotations

import re

from vhpc_slurm.record import Record

INFINITE = 65534
"""How ``scontrol show config`` prints a PrologEpilogTimeout that is not set (NO_VAL16)."""
_LINE = re.compile(r"^(\S[^=]*?)(?:\[\d+\])?\s*= ?(.*)$")


class SlurmSettings(Record, frozen=True):
    """Slurm's configuration as slurmctld reports it; a key may have several values.

    ``control_hosts`` are host names without address and domain.
    """

    values: dict[str, tuple[str, ...]]
    control_hosts: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> SlurmSettings:
        """Parse the output of ``scontrol show config``; ``(null)`` means that a key has no value."""
        values: dict[str, tuple[str, ...]] = {}
        for line in text.splitlines():
            match = _LINE.match(line)
            if match:
                value = match[2].strip()
                kept = () if value in ("(null)", "") else (value,)
                values[match[1]] = values.get(match[1], ()) + kept
        hosts = tuple(re.split(r"[(.]", host)[0] for host in values.get("SlurmctldHost", ()))
        return cls(values, hosts)

    def first(self, key: str) -> str:
        """The first value of a key, empty when it has none."""
        return next(iter(self.values.get(key, ())), "")

    def words(self, key: str) -> set[str]:
        """The comma-separated words of a value, in lower case."""
        return {word.strip().lower() for word in self.first(key).split(",") if word.strip()}

    def seconds(self, key: str) -> int | None:
        """A time in seconds; None when it has no limit or is not set."""
        match = re.match(r"^(\d+)", self.first(key))
        return None if match is None or int(match[1]) >= INFINITE else int(match[1])
