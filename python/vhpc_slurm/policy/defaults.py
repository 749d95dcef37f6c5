# SPDX-License-Identifier: Apache-2.0
"""Values that rules of the site give to jobs whose users have not given an option.  Pure."""
# Decision: Defaults come from several rules, limits from one

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from vhpc_slurm.config import Config
from vhpc_slurm.config.policy import Rule
from vhpc_slurm.model import DEFAULTED, BatchPlace, JobRequest
from vhpc_slurm.policy.limits import Asked, refused
from vhpc_slurm.policy.rules import Subject, applying, holds
from vhpc_slurm.record import Record


class Default(Record, frozen=True):
    """A value for an option, of ``rule``.

    ``certain`` is false if it is not known whether the conditions of that rule hold.
    """

    value: Any
    rule: Rule
    certain: bool = True


def candidates(rules: Sequence[Rule], first: Rule, subject: Subject, field: str) -> list[Default]:
    """The values one of which a job gets for a field, if ``first`` is the rule that applies to it.

    Rules before ``first`` do not hold then. Values that ``first`` does not permit are left out. Only
    the last one is certain; if none is, the job may get no value.
    """
    found = []
    for rule in rules[list(rules).index(first) :]:
        value, held = getattr(rule, f"default_{field}"), True if rule is first else holds(rule, subject)
        if value is None or held is False or not _permits(first, field, value):
            continue
        found.append(Default(value, rule, held is True))
        if held:
            break
    return found


def with_defaults(config: Config, request: JobRequest) -> JobRequest:
    """A request with the values of rules for what its user has not given; the same one if there are none."""
    subject = Subject.of(request)
    first = applying(config.policy, subject)
    if first is None:
        return request
    values: dict[str, Any] = {}
    origin = []
    for field in DEFAULTED:
        if field not in request.unset:
            continue
        for found in candidates(config.policy, first, subject, field):
            values[field] = BatchPlace(found.value) if field == "batch" else found.value
            origin.append((field, found.rule.name))
            if field == "disk_mib":
                values["disk_mount"] = found.rule.default_disk_mount or ""
    return replace(request, **values, defaults=tuple(origin)) if origin else request


def _permits(rule: Rule, field: str, value: Any) -> bool:
    asked: dict[str, Any] = {field: tuple(value.split(",")) if field == "network" else value}
    return not refused(rule, Asked(**asked))
