# SPDX-License-Identifier: Apache-2.0
"""Values that rules of the site give to jobs whose users have not given an option.  Pure."""
# Decision: Defaults come from several rules, limits from one

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from vhpc_slurm.config import Config
from vhpc_slurm.config.policy import DEFAULTED, Rule
from vhpc_slurm.model import JobRequest
from vhpc_slurm.options import Option
from vhpc_slurm.policy.limits import option_refusal
from vhpc_slurm.policy.rules import Subject, applying, holds
from vhpc_slurm.record import Record


class Default(Record, frozen=True):
    """The value of ``rule`` for an option.

    ``certain`` is false if it is not known whether the conditions of that rule hold.
    """

    option: Option
    rule: Rule
    certain: bool = True

    @property
    def values(self) -> dict[str, Any]:
        """Values of the keys ``default_FIELD``, by the field of ``JobRequest``; those that the rule has."""
        own = {field: getattr(self.rule, f"default_{field}") for field in self.option.fields}
        return {field: value for field, value in own.items() if value is not None}

    @property
    def value(self) -> Any:
        """The value of the first field."""
        return self.values.get(self.option.field)


def candidates(rules: Sequence[Rule], first: Rule, subject: Subject, option: Option) -> list[Default]:
    """The possible values of an option for a job, if ``first`` is the rule that applies to it.

    Rules before ``first`` do not hold then. Values that ``first`` does not permit are left out. Only
    the last one is certain; if none is, the job may get no value.
    """
    found = []
    for rule in rules[list(rules).index(first) :]:
        held = True if rule is first else holds(rule, subject)
        one = Default(option, rule, held is True)
        if one.value is None or held is False or option_refusal(first, option, one.value):
            continue
        found.append(one)
        if held:
            break
    return found


def with_defaults(config: Config, request: JobRequest) -> JobRequest:
    """A request with the values of rules for what its user has not given; the same one if there are none."""
    subject = Subject.of(request)
    first = applying(config.policy, subject)
    if first is None:
        return request
    fields: dict[str, Any] = {}
    origin = []
    for option in DEFAULTED:
        if option.field not in request.unset:
            continue
        for found in candidates(config.policy, first, subject, option):
            fields |= option.values(option.text(found.values))
            origin.append((option.field, found.rule.name))
    return replace(request, **fields, defaults=tuple(origin)) if origin else request
