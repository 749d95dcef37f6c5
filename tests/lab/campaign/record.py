# SPDX-License-Identifier: Apache-2.0
"""The record of a campaign: submissions, faults, and actions of the operator."""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster import Done

from campaign.attack import Attacks
from campaign.faults import FAULTS, Fault
from campaign.kinds import KINDS, Kind
from campaign.plan import PlannedFault, PlannedJob
from campaign.trends import Sample


@dataclass
class Submitted:
    """The result of a submission; ``answer`` is of sbatch, or of srun if that is the whole job."""

    plan: PlannedJob
    at: float
    id: int = 0
    answer: Done | None = None

    @property
    def kind(self) -> Kind:
        """Its kind."""
        return KINDS[self.plan.kind]

    @property
    def keys(self) -> tuple[tuple[str, int], ...]:
        """Its identity in Slurm: its name, and the index of each array element."""
        return tuple((self.plan.name, index) for index in range(self.kind.tasks))


@dataclass
class Injected:
    """A fault that was carried out: when, until when, and what it hit."""

    plan: PlannedFault
    begin: float
    end: float = 0.0
    node: str = ""
    target: tuple[str, int] | None = None
    note: str = ""

    @property
    def fault(self) -> Fault:
        """Its kind."""
        return FAULTS[self.plan.kind]


@dataclass
class Record:
    """Everything that was done; times in seconds since the beginning."""

    submitted: list[Submitted] = field(default_factory=list)
    injected: list[Injected] = field(default_factory=list)
    missed: list[PlannedFault] = field(default_factory=list)
    helped: list[str] = field(default_factory=list)
    """Actions of the operator."""
    broken: list[str] = field(default_factory=list)
    """Failed parts of the campaign itself."""
    attacks: Attacks | None = None
    samples: list[Sample] = field(default_factory=list)
    """Resources of daemons during the run, on a light lab."""
