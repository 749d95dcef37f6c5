# SPDX-License-Identifier: Apache-2.0
"""The rules of [[policy]]: whether Slurm checks what they rely on, and whether signatures can be checked."""

from __future__ import annotations

import pwd
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from vhpc_slurm.cli.host.checks import CheckResult, error, ok, warn
from vhpc_slurm.config import Config
from vhpc_slurm.config.policy import Rule
from vhpc_slurm.errors import FabricError
from vhpc_slurm.policy import signatures
from vhpc_slurm.policy.rules import covers, matches
from vhpc_slurm.slurm.port import SlurmPartition
from vhpc_slurm.slurm.settings import SlurmSettings

ENFORCEMENT = {"accounts": "associations", "qos": "qos"}
"""Settings that Slurm must enforce so that users cannot choose the value of a condition."""
CONDITIONS = {"partitions", "accounts", "qos", "users"}
SIGNER_FILES = ("allowed_signers", "revoked_signers")
DEFAULTS = tuple(key for key in Rule.__struct_fields__ if key.startswith("default_"))
PERMITS = tuple(key for key in Rule.__struct_fields__ if key not in {"name", *CONDITIONS, *DEFAULTS})


def check(
    config: Config, settings: SlurmSettings, partitions: Sequence[SlurmPartition]
) -> Iterator[CheckResult]:
    """On the controller's host: conditions, and the files of signers."""
    if not config.policy:
        return
    found = [
        *_conditions(config, settings),
        *_clusters(config, settings),
        *_partitions(config, partitions),
        *_hidden(config),
        *_files(config),
    ]
    yield from found or [ok("policy", f"rules of the policy: {len(config.policy)}")]


def on_node(config: Config) -> Iterator[CheckResult]:
    """On a compute node, as root: what it needs to check signatures again; nothing if no rule has signers."""
    if not any(rule.signers for rule in config.policy):
        return
    problems = []
    for key in SIGNER_FILES:
        path = getattr(config.images, key)
        try:
            if path:
                Path(path).read_bytes()
        except OSError as err:
            problems.append(f"images.{key} = {path} cannot be read: {err.strerror}")
    try:
        signatures.program()
    except FabricError as err:
        problems.append(err.why)
    hint = "jobs whose rule has signers are requeued without end: nodes need ssh-keygen and vhpcd's files"
    yield from [error("policy.signers", problem, hint) for problem in problems] or [
        ok("policy.signers", "this node can check signatures of images")
    ]


def _conditions(config: Config, settings: SlurmSettings) -> Iterator[CheckResult]:
    enforced = settings.words("AccountingStorageEnforce")
    for key, word in ENFORCEMENT.items():
        rules = [rule.name for rule in config.policy if getattr(rule, key)]
        if rules and word not in enforced:
            yield warn(
                "policy.accounting",
                f"policy rule {rules[0]!r} has {key}, which users choose freely: Slurm does not check them",
                f"AccountingStorageEnforce={word} in slurm.conf",
            )


def _clusters(config: Config, settings: SlurmSettings) -> Iterator[CheckResult]:
    """Rules that permit clusters of accounts, where Slurm does not know who is in an account."""
    rules = [rule.name for rule in config.policy if rule.account_clusters != "none"]
    if rules and settings.first("AccountingStorageType") != "accounting_storage/slurmdbd":
        yield warn(
            "policy.accounting",
            f"policy rule {rules[0]!r} has account_clusters, and Slurm has no associations: no job gets one",
            "AccountingStorageType=accounting_storage/slurmdbd in slurm.conf",
        )


def _partitions(config: Config, partitions: Sequence[SlurmPartition]) -> Iterator[CheckResult]:
    for rule in config.policy:
        if rule.partitions and not any(matches(rule.partitions, one.name) for one in partitions):
            text = ", ".join(rule.partitions)
            yield warn(
                "policy.partitions",
                f"policy rule {rule.name!r} never applies: Slurm has no partition {text}",
                "correct its partitions in vhpc.toml",
            )


def _hidden(config: Config) -> Iterator[CheckResult]:
    """Rules before which another one always applies, unless they give defaults that count."""
    for place, rule in enumerate(config.policy):
        before = [one for one in config.policy[:place] if covers(one, rule)]
        counts = any(
            getattr(rule, key) is not None and not any(getattr(one, key) is not None for one in before)
            for key in DEFAULTS
        )
        if before and not counts:
            yield warn(
                "policy.order",
                f"policy rule {rule.name!r} never applies: {before[0].name!r} is before it, and applies to "
                "all of its jobs",
                "put the rule with fewer jobs first in vhpc.toml",
            )
        elif before and (key := _ignored(rule)):
            yield warn(
                "policy.order",
                f"policy rule {rule.name!r} gives only defaults, and its {key} does not count: "
                f"{before[0].name!r} is before it, and applies to all of its jobs",
                f"put {key} into {before[0].name!r}",
            )


def _ignored(rule: Rule) -> str:
    """The first key that is set in a rule and permits something; empty if no such key is set."""
    plain = Rule(name=rule.name)
    return next((key for key in PERMITS if getattr(rule, key) != getattr(plain, key)), "")


def _files(config: Config) -> Iterator[CheckResult]:
    """Whether vhpcd can read the files of signers."""
    for key in SIGNER_FILES:
        text = getattr(config.images, key)
        if not text:
            continue
        try:
            info = Path(text).stat()
            owner = pwd.getpwnam(config.controller.user).pw_uid
        except (OSError, KeyError) as err:
            why = f"images.{key} = {text} cannot be read: {err}"
            yield error("policy.signers", why, "jobs whose rule has signers are requeued without end")
            continue
        if not (info.st_mode & stat.S_IROTH or (info.st_uid == owner and info.st_mode & stat.S_IRUSR)):
            what = f"{config.controller.user} cannot read {text} (images.{key})"
            yield error("policy.signers", what, f"chmod a+r {text}")
