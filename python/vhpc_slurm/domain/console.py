# SPDX-License-Identifier: Apache-2.0
"""The serial console, written to a file: what a guest says while it boots or dies."""

from __future__ import annotations

from dataclasses import dataclass

from vhpc_slurm.domain.spec import DomainSpec


@dataclass(frozen=True)
class ConsoleContext:
    """Values of the console template."""

    file: str


def context(spec: DomainSpec) -> ConsoleContext:
    """The guest's ttyS0."""
    return ConsoleContext(spec.console_log)
