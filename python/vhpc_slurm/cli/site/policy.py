# SPDX-License-Identifier: Apache-2.0
"""`vhpc policy`: which rules of the site apply to a job, and what it gets of what it asks for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

import typer

from vhpc_slurm.catalog import FolderCatalog
from vhpc_slurm.cli import context, options, output
from vhpc_slurm.cli.options import Json
from vhpc_slurm.config import Config
from vhpc_slurm.config.policy import Rule
from vhpc_slurm.errors import UserError
from vhpc_slurm.importing.source import is_source
from vhpc_slurm.model import DEFAULTED, ImageIdentity, ImageRef
from vhpc_slurm.policy import PolicyError, Subject, check_image, mount_refusal, possible, shares_under
from vhpc_slurm.policy.defaults import Default, candidates
from vhpc_slurm.policy.limits import Asked, refused

NO_RULE = "no rule"
LIMITS = ("batch", "max_guests_per_node", "max_disk_mib", "max_vfs", "max_timeout_s")
"""Keys of rules, beside images, signers, networks and shares, that permit something."""

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
Network = Annotated[
    str | None,
    typer.Option("--network", metavar="NETWORK", help="Its --vhpc-network.", show_default=False),
]
Image = Annotated[
    str | None,
    typer.Option("--image", metavar="[own/]NAME[:TAG][@DIGEST]", help="Its image.", show_default=False),
]
Disk = Annotated[options.Disk | None, options.disk_option("Its --vhpc-disk.")]
Batch = Annotated[
    str | None,
    typer.Option("--batch", metavar="guest|host", help="Its --vhpc-batch.", show_default=False),
]
Guests = Annotated[
    int | None,
    typer.Option("--guests-per-node", metavar="N", help="Its --vhpc-guests-per-node.", show_default=False),
]
Vfs = Annotated[int | None, typer.Option("--vfs", metavar="N", help="Its --vhpc-vfs.", show_default=False)]
Timeout = Annotated[
    int | None, typer.Option("--timeout", metavar="SECONDS", help="Its --vhpc-timeout.", show_default=False)
]
Show = Annotated[bool, typer.Option("--show", help="Print what the job gets, and who has set it.")]


@dataclass(frozen=True)
class Verdict:
    """A rule that may apply, None where perhaps none does, and why it refuses the job.

    ``defaults`` has, by the field of ``JobRequest``, the values one of which a job without the option gets.
    """

    rule: Rule | None
    refusal: UserError | None
    defaults: dict[str, list[Default]]


@dataclass(frozen=True)
class Wish:
    """A job as a user describes it: its image, as written, and the values of its other options.

    An image of None, or a source that has to be imported first, is not judged, nor is what is None
    in ``asked``.
    """

    image: str | None = None
    asked: Asked = field(default_factory=Asked)


def _subject(user: str, partition: str | None, account: str | None, qos: str | None) -> Subject:
    return Subject(user or context.user_name(), partition, account, qos)


def _wish(
    image: str | None,
    network: str | None,
    disk: options.Disk | None,
    batch: str | None,
    guests: int | None,
    vfs: int | None,
    timeout: int | None,
) -> Wish:
    words = None if network is None else tuple(network.split(","))
    mib, mount = (None, "") if disk is None else (disk.mib, disk.mount)
    return Wish(image, Asked(words, mib, batch, guests, vfs, timeout, mount))


def _image(config: Config, image: str | None) -> tuple[ImageIdentity, FolderCatalog] | None:
    if image is None or is_source(image):
        return None
    catalog = options.catalog(config, None, image)
    return catalog.resolve(ImageRef.parse(image)), catalog


def _refusal(
    config: Config, rule: Rule | None, asked: Asked, image: tuple[ImageIdentity, FolderCatalog] | None
) -> UserError | None:
    if why := mount_refusal(asked.disk_mount, shares_under(config, rule).site):
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


def verdicts(config: Config, subject: Subject, wish: Wish) -> list[Verdict]:
    """What each rule that may apply says of a job.

    Args:
        config: has the rules.
        subject: of the job; what is None there is not known.
        wish: what the job asks for.

    Raises:
        UserError: the image does not exist.
    """
    image = _image(config, wish.image)
    found = []
    for rule in possible(config.policy, subject):
        defaults = {}
        if rule is not None:
            every = {key: candidates(config.policy, rule, subject, key) for key in DEFAULTED}
            defaults = {key: values for key, values in every.items() if values}
        found.append(Verdict(rule, _refusal(config, rule, wish.asked, image), defaults))
    return found


def check(
    user: User = "",
    partition: Partition = None,
    account: Account = None,
    qos: Qos = None,
    image: Image = None,
    network: Network = None,
    disk: Disk = None,
    batch: Batch = None,
    guests_per_node: Guests = None,
    vfs: Vfs = None,
    timeout: Timeout = None,
    show: Show = False,
    as_json: Json = False,
) -> int:
    """Exit with status 1, and one line, if no rule that may apply permits the job; else print nothing.

    With --show, print what the job gets: the values of its options, of rules, and of the site.
    """
    config, subject = options.config(), _subject(user, partition, account, qos)
    wish = _wish(image, network, disk, batch, guests_per_node, vfs, timeout)
    found = verdicts(config, subject, wish)
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
                        for option, value, origin in _gets(config, one, wish.asked)
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
            for option, value, origin in _gets(config, one, wish.asked)
        ]
        output.write_table(("RULE", "OPTION", "VALUE", "FROM"), rows)
    return 0


def _gets(config: Config, verdict: Verdict, asked: Asked) -> list[tuple[str, Any, str]]:
    """(option, value, who has set it) of a job that a rule permits."""
    site = {"network": config.network.default, "disk_mib": 0, "batch": "guest", "guests_per_node": 1}
    rows: list[tuple[str, Any, str]] = []
    for key, plain in site.items():
        own, values = getattr(asked, key), verdict.defaults.get(key, [])
        if own is not None:
            rows.append((key, ",".join(own) if key == "network" else own, "the job"))
            if key == "disk_mib" and asked.disk_mount:
                rows.append(("disk_mount", asked.disk_mount, "the job"))
            continue
        for one in values:
            rows.append((key, one.value, _origin(one)))
            if mount := _mount(key, one):
                rows.append(("disk_mount", mount, _origin(one)))
        if not any(one.certain for one in values):
            rows.append((key, plain, "the site"))
    return rows


def _mount(field: str, found: Default) -> str:
    """The directory at which a disk of a rule is mounted; empty for other defaults."""
    return (found.rule.default_disk_mount or "") if field == "disk_mib" else ""


def _origin(found: Default) -> str:
    return f"policy rule {found.rule.name!r}" + ("" if found.certain else ", if it applies")


def explain(
    user: User = "",
    partition: Partition = None,
    account: Account = None,
    qos: Qos = None,
    image: Image = None,
    network: Network = None,
    disk: Disk = None,
    batch: Batch = None,
    guests_per_node: Guests = None,
    vfs: Vfs = None,
    timeout: Timeout = None,
    as_json: Json = False,
) -> int:
    """Show which rule applies to a job, what it permits, and which values it sets.

    If partition, account or QOS are not given, all rules that may apply are shown. With --image,
    --network and other options of the job, each of them says whether it permits these.
    """
    config, subject = options.config(), _subject(user, partition, account, qos)
    wish = _wish(image, network, disk, batch, guests_per_node, vfs, timeout)
    found = verdicts(config, subject, wish)
    if as_json:
        output.write_json([_row(verdict) for verdict in found])
    else:
        head = ("RULE", "APPLIES IF", "IMAGES", "SIGNERS", "NETWORKS", "SHARES", "LIMITS", "DEFAULTS")
        judged = wish != Wish()
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
        "networks": None if rule is None else rule.networks,
        "shares": None if rule is None else rule.shares,
        **{key: None if rule is None else getattr(rule, key) for key in LIMITS},
        "defaults": {key: [_default(key, one) for one in values] for key, values in verdict.defaults.items()},
        "refusal": None if refusal is None else refusal.line(),
    }


def _default(field: str, found: Default) -> dict[str, object]:
    row = {"value": found.value, "rule": found.rule.name, "certain": found.certain}
    mount = _mount(field, found)
    return row | {"mount": mount} if mount else row


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
    """The limits that a rule lowers, in the words of the options."""
    places = [f"batch={rule.batch[0]}"] if len(rule.batch) == 1 else []
    numbers = (
        ("guests-per-node", rule.max_guests_per_node, ""),
        ("disk", rule.max_disk_mib, "M"),
        ("vfs", rule.max_vfs, ""),
        ("timeout", rule.max_timeout_s, ""),
    )
    return ", ".join(
        [*places, *(f"{name}<={most}{unit}" for name, most, unit in numbers if most is not None)]
    )


def _defaults(verdict: Verdict) -> str:
    """The values for jobs without the options; those of other rules with the name of the rule."""
    texts = []
    for key, values in verdict.defaults.items():
        name = key.removesuffix("_mib").replace("_", "-")
        for one in values:
            unit = "M" if key.endswith("_mib") else ""
            unit += f":{mount}" if (mount := _mount(key, one)) else ""
            origin = "" if one.rule is verdict.rule else f" ({_origin(one)})"
            texts.append(f"{name}={one.value}{unit}{origin}")
    return ", ".join(texts)


def _result(verdict: Verdict) -> str:
    return "permitted" if verdict.refusal is None else verdict.refusal.line()
