# SPDX-License-Identifier: Apache-2.0
"""Which rule of [[policy]] applies to a job, and what it permits.  Pure."""
# Decision: The first rule that applies decides alone

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

import msgspec

from vhpc_slurm.config import Config
from vhpc_slurm.config.policy import Rule
from vhpc_slurm.config.shares import Shares
from vhpc_slurm.model import JobRequest
from vhpc_slurm.record import Record


class Subject(Record, frozen=True):
    """Of a job, what conditions of rules are about; empty: Slurm has none; None: not known."""

    user: str
    partition: str | None = ""
    account: str | None = ""
    qos: str | None = ""

    @classmethod
    def of(cls, request: JobRequest) -> Subject:
        """That of a job."""
        return cls(request.user, request.partition, request.account, request.qos)


def possible(rules: Sequence[Rule], subject: Subject) -> list[Rule | None]:
    """The rules that may apply, in their order; the last is None if perhaps no rule applies.

    It is one rule, or None alone, if everything of the subject is known.
    """
    found: list[Rule | None] = []
    for rule in rules:
        held = holds(rule, subject)
        if held is not False:
            found.append(rule)
        if held:
            return found
    return [*found, None]


def holds(rule: Rule, subject: Subject) -> bool | None:
    """Whether all conditions of a rule hold; None if that depends on what is not known."""
    conditions = (
        (rule.partitions, subject.partition),
        (rule.accounts, subject.account),
        (rule.qos, subject.qos),
        (rule.users, subject.user),
    )
    asked = [(patterns, text) for patterns, text in conditions if patterns]
    if any(text is not None and not matches(patterns, text) for patterns, text in asked):
        return False
    return True if all(text is not None for _, text in asked) else None


def applying(rules: Sequence[Rule], subject: Subject) -> Rule | None:
    """The first rule whose conditions all hold; None if there is no such rule."""
    return possible(rules, subject)[0]


def covers(first: Rule, second: Rule) -> bool:
    """Whether the conditions of one rule hold wherever those of another do.

    False also where that cannot be seen: patterns count as parts of a pattern only if that has no
    special characters, is the same, or the other one is ``*``.
    """
    return all(
        not wide or (narrow and all(any(_contains(one, text) for one in wide) for text in narrow))
        for wide, narrow in (
            (first.partitions, second.partitions),
            (first.accounts, second.accounts),
            (first.qos, second.qos),
            (first.users, second.users),
        )
    )


def _contains(pattern: str, text: str) -> bool:
    special = any(char in text for char in "*?[")
    return pattern in ("*", text) or (not special and fnmatchcase(text, pattern))


def image_refusal(rule: Rule, labels: Sequence[str]) -> str:
    """Why a rule does not permit an image with these names; empty if it does, perhaps only if it is signed.

    An image without a name is permitted where all images are.
    """
    if any(matches(rule.images, label) for label in labels or ("",)):
        return ""
    refusal = f"it permits {listed(rule.images)}" if rule.images else "it permits no image"
    return refusal if labels else f"{refusal}, and no name has this digest now"


def signer_refusal(rule: Rule, signers: Iterable[str]) -> str:
    """Why the principals who have signed an image are not enough for a rule; empty if they are."""
    found = sorted(signers)
    if not rule.signers or any(matches(rule.signers, one) for one in found):
        return ""
    wanted = f"the image needs a signature of {listed(rule.signers)}"
    return f"{wanted}, and is signed by {listed(found)}" if found else wanted


def visible_shares(config: Config, request: JobRequest) -> Shares:
    """The settings of shares for a job, without what its user or its rule leaves out."""
    return shares_under(config, applying(config.policy, Subject.of(request)), request.shares)


def shares_under(config: Config, rule: Rule | None, asked: str | None) -> Shares:
    """The settings of shares without what a rule leaves out, or the value of --vhpc-shares."""
    own = config.shares
    kinds = {"home", "work_dir", "site"} if rule is None else {*rule.shares}
    if asked is not None:
        kinds &= {*asked.split(",")}
    return msgspec.structs.replace(
        own,
        home=own.home and "home" in kinds,
        work_dir=own.work_dir and "work_dir" in kinds,
        site=own.site if "site" in kinds else (),
    )


def matches(patterns: Iterable[str], text: str) -> bool:
    """Whether a text matches one of some patterns."""
    return any(fnmatchcase(text, pattern) for pattern in patterns)


def listed(texts: Iterable[str]) -> str:
    """Some texts, for a message."""
    return ", ".join(texts) or "nothing"
