# SPDX-License-Identifier: Apache-2.0
"""A guest lives once: power off, reboot and crash all end it."""

from __future__ import annotations

from dataclasses import dataclass

from vhpc_slurm.domain.spec import DomainSpec


@dataclass(frozen=True)
class LifecycleContext:
    """Values of the lifecycle template: one action for every end."""

    action: str


def context(_spec: DomainSpec) -> LifecycleContext:
    """Destroy, whatever happened: nothing of a job may come back by itself."""
    return LifecycleContext("destroy")
