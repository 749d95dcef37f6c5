# SPDX-License-Identifier: Apache-2.0
"""`vhpc policy`: which rules of the site apply to a job, and what it gets of what it asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from vhpc_slurm.catalog import FolderCatalog
from vhpc_slurm.cli import context, options, output
from vhpc_slurm.cli.options import Json
from vhpc_slurm.config import Config
from vhpc_slurm.config.policy import DEFAULTED, LIMITED, Rule
from vhpc_slurm.errors import UserError
from vhpc_slurm.importing.source import is_source
from vhpc_slurm.model import WITHOUT_OPTIONS, ImageIdentity, ImageRef
from vhpc_slurm.options import IMAGE, NETWORK, OPTIONS, Option
from vhpc_slurm.policy import (
    QUOTAS,
    PolicyError,
    Subject,
    bind_refusal,
    check_image,
    clusters,
    mount_refusal,
    possible,
    shares_under,
)
from vhpc_slurm.policy.defaults import Default, candidates
from vhpc_slurm.policy.limits import refused

NO_RULE = "no rule"
LIMITS = {option: option.limit.key for option in LIMITED if option.limit is not None}
"""Keys of rules that limit options."""
KEPT = {f"checkpoints of {quota.owner}": (quota.key, "M") for quota in QUOTAS}
"""Keys of rules that limit what stays after jobs, and the units of their values."""
KEYS = (
    *LIMITS.values(),
    *(key for key, _ in (*KEPT.values(), *clusters.LIMITS.values())),
    "account_clusters",
)
"""Keys of rules that are shown as they are."""
JUDGED = tuple(option for option in OPTIONS if option is not IMAGE)
Asked = Mapping[str, Any]
"""Values of options, by the field of ``JobRequest``."""

User = Annotated[
    str, typer.Option("--user", metavar="USER", help="User of the job; default: you.", show_default=False)
]
Partition = Annotated[
    str | None, typer.Option("--partition", metavar="P", help="Its partition.", show_default=False)
]
Account = Annotated[
    str | None, typer.Option("--account", metavar="A", help="Its account.", show_default=False)
]
Qos = Annotated[str | None, typer.Option("--qos", metavar="Q", help="Its QOS.", show_default=False)]
ImageName = Annotated[
    str | None,
    typer.Option("--image", metavar="[own/]NAME[:TAG][@DIGEST]", help="Its image.", show_default=False),
]
ImageOrVariable = Annotated[
    str | None,
    typer.Option(
        "--image",
        metavar="[own/]NAME[:TAG][@DIGEST]",
        help="Its image.",
        show_default=False,
        envvar=IMAGE.variable,
        show_envvar=False,
    ),
]
Show = Annotated[bool, typer.Option("--show", help="Print what the job gets, and who has set it.")]


@dataclass(frozen=True)
class Verdict:
    """A rule that may apply, None where perhaps none does, and why it refuses the job.

    ``defaults`` has the values of rules; a job without the option gets one of them.
    """

    rule: Rule | None
    refusal: UserError | None
    defaults: dict[Option, list[Default]]


def _subject(user: str, partition: str | None, account: str | None, qos: str | None) -> Subject:
    return Subject(user or context.user_name(), partition, account, qos)


def _image(config: Config, image: str | None) -> tuple[ImageIdentity, FolderCatalog] | None:
    if image is None or is_source(image):
        return None
    catalog = options.catalog(config, None, image)
    return catalog.resolve(ImageRef.parse(image)), catalog


def _refusal(
    config: Config, rule: Rule | None, asked: Asked, image: tuple[ImageIdentity, FolderCatalog] | None
) -> UserError | None:
    folders = shares_under(config, rule, asked.get("shares")).site
    disk_mount = asked.get("disk_mount", "")
    if why := (
        mount_refusal(disk_mount, folders)
        or bind_refusal(asked.get("mounts"), disk_mount, folders)
        or clusters.job_refusal(rule, asked.get("cluster") or "")
    ):
        return UserError(why)
    if rule is None:
        return None
    if why := refused(rule, asked):
        return PolicyError(f"policy rule {rule.name!r} refuses the job", why)
    if image is None:
        return None
    try:
        check_image(config, rule, *image)
    except UserError as err:
        return err
    return None


def verdicts(config: Config, subject: Subject, image: str | None, asked: Asked) -> list[Verdict]:
    """Results of a job by each rule that may apply.

    Args:
        config: has the rules.
        subject: of the job; what is None there is not known.
        image: as its user writes it; None, or a source that has to be imported first: it is not judged.
        asked: values of its other options; what is absent is not judged.

    Raises:
        UserError: the image does not exist.
    """
    found_image = _image(config, image)
    found = []
    for rule in possible(config.policy, subject):
        defaults = {}
        if rule is not None:
            every = {one: candidates(config.policy, rule, subject, one) for one in DEFAULTED}
            defaults = {one: values for one, values in every.items() if values}
        found.append(Verdict(rule, _refusal(config, rule, asked, found_image), defaults))
    return found


@options.sbatch(JUDGED, "Its --vhpc-{0.name}.".format, variables=True)
def check(
    user: User = "",
    partition: Partition = None,
    account: Account = None,
    qos: Qos = None,
    image: ImageOrVariable = None,
    *,
    asked: Asked,
    show: Show = False,
    as_json: Json = False,
) -> int:
    """Exit with status 1, and one line, if no rule that may apply permits the job; else print nothing.

    With --show, print what the job gets: the values of its options, of rules, and of the site. Variables
    of the environment set options that are not given, as for sbatch.
    """
    config, subject = options.config(), _subject(user, partition, account, qos)
    found = verdicts(config, subject, image, asked)
    if all(verdict.refusal for verdict in found) and (refusal := found[0].refusal) is not None:
        raise refusal
    if as_json:
        output.write_json(
            [
                {
                    "rule": None if one.rule is None else one.rule.name,
                    "refusal": None if one.refusal is None else one.refusal.line(),
                    "gets": [
                        {"option": option, "value": value, "from": origin}
                        for option, value, origin in _gets(config, one, asked)
                    ],
                }
                for one in found
            ]
        )
    elif show:
        rows = [
            (NO_RULE if one.rule is None else one.rule.name, option, str(value), origin)
            for one in found
            if one.refusal is None
            for option, value, origin in _gets(config, one, asked)
        ]
        output.write_table(("RULE", "OPTION", "VALUE", "FROM"), rows)
    return 0


def _gets(config: Config, verdict: Verdict, asked: Asked) -> list[tuple[str, Any, str]]:
    """(field, value, who has set it) of a job that a rule permits."""
    site = WITHOUT_OPTIONS | {"network": config.network.default, "disk_mib": 0}
    rows: list[tuple[str, Any, str]] = []
    for option in DEFAULTED:
        if option.field in asked:
            values = {field: asked[field] for field in option.fields}
            rows += [(key, value, "the job") for key, value in values.items() if value != ""]
            continue
        found = verdict.defaults.get(option, [])
        rows += [(key, value, _origin(one)) for one in found for key, value in one.values.items()]
        if not any(one.certain for one in found):
            rows.append((option.field, site[option.field], "the site"))
    return rows


def _origin(found: Default) -> str:
    return f"policy rule {found.rule.name!r}" + ("" if found.certain else ", if it applies")


@options.sbatch(JUDGED, "Its --vhpc-{0.name}.".format)
def explain(
    user: User = "",
    partition: Partition = None,
    account: Account = None,
    qos: Qos = None,
    image: ImageName = None,
    *,
    asked: Asked,
    as_json: Json = False,
) -> int:
    """Show which rule applies to a job, what it permits, and which values it sets.

    If partition, account or QOS are not given, all rules that may apply are shown. With --image,
    --network and other options of the job, each of them says whether it permits these.
    """
    config, subject = options.config(), _subject(user, partition, account, qos)
    found = verdicts(config, subject, image, asked)
    if as_json:
        output.write_json([_row(verdict) for verdict in found])
    else:
        head = ("RULE", "APPLIES IF", "IMAGES", "SIGNERS", "NETWORKS", "SHARES", "LIMITS", "DEFAULTS")
        judged = image is not None or bool(asked)
        rows = [(*_cells(verdict, subject), *([_result(verdict)] if judged else ())) for verdict in found]
        output.write_table((*head, *(["RESULT"] if judged else ())), rows)
    return int(all(verdict.refusal for verdict in found))


def _row(verdict: Verdict) -> dict[str, object]:
    rule, refusal = verdict.rule, verdict.refusal
    return {
        "rule": None if rule is None else rule.name,
        "partitions": None if rule is None else rule.partitions,
        "accounts": None if rule is None else rule.accounts,
        "qos": None if rule is None else rule.qos,
        "users": None if rule is None else rule.users,
        "images": None if rule is None else rule.images,
        "signers": None if rule is None else rule.signers,
        "shares": None if rule is None else rule.shares,
        **{key: None if rule is None else getattr(rule, key) for key in KEYS},
        "defaults": {
            option.field: [_default(one) for one in values] for option, values in verdict.defaults.items()
        },
        "refusal": None if refusal is None else refusal.line(),
    }


def _default(found: Default) -> dict[str, object]:
    (_, value), *more = found.values.items()
    row = {"value": value, "rule": found.rule.name, "certain": found.certain}
    return row | {field.removeprefix(f"{found.option.name}_"): value for field, value in more}


def _cells(verdict: Verdict, subject: Subject) -> tuple[str, ...]:
    rule = verdict.rule
    if rule is None:
        site = "those of the site"
        return NO_RULE, "no other rule does", "all", "none needed", site, site, site, site
    return (
        rule.name,
        unknown(rule, subject) or "always",
        ", ".join(rule.images) or "none",
        ", ".join(rule.signers) or "none needed",
        ", ".join(rule.networks) or "none",
        ", ".join(rule.shares) or "none",
        _limits(rule) or "those of the site",
        _defaults(verdict) or "those of the site",
    )


def unknown(rule: Rule, subject: Subject) -> str:
    """The conditions of a rule that cannot be checked, because the job's value is not known; or empty."""
    conditions = (
        ("partition", rule.partitions, subject.partition),
        ("account", rule.accounts, subject.account),
        ("QOS", rule.qos, subject.qos),
    )
    return ", ".join(
        f"{name} is {' or '.join(texts)}" for name, texts, known in conditions if texts and known is None
    )


def _limits(rule: Rule) -> str:
    """The limits that a rule lowers, in the words of the options; networks have a column."""
    texts = []
    for option, key in LIMITS.items():
        permitted = getattr(rule, key)
        if isinstance(permitted, tuple):
            if len(permitted) == 1 and option is not NETWORK:
                texts.append(f"{option.name}={permitted[0]}")
        elif permitted is not None:
            texts.append(f"{option.name}<={permitted}{option.unit}")
    if rule.account_clusters != "none":
        texts.append(f"clusters of accounts={rule.account_clusters}")
    for words, (key, unit) in (*KEPT.items(), *clusters.LIMITS.items()):
        if (most := getattr(rule, key)) is not None:
            texts.append(f"{words}<={most}{unit}")
    return ", ".join(texts)


def _defaults(verdict: Verdict) -> str:
    """The values for jobs without the options; those of other rules with the name of the rule."""
    texts = []
    for option, values in verdict.defaults.items():
        for one in values:
            origin = "" if one.rule is verdict.rule else f" ({_origin(one)})"
            texts.append(f"{option.name}={option.text(one.values)}{origin}")
    return ", ".join(texts)


def _result(verdict: Verdict) -> str:
    return "permitted" if verdict.refusal is None else verdict.refusal.line()
