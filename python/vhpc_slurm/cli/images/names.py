# SPDX-License-Identifier: Apache-2.0
"""vhpc image names: the images that a user may name."""

from __future__ import annotations

from collections.abc import Iterable

from vhpc_slurm.catalog import own_catalog, site_catalog
from vhpc_slurm.cli import context, options, output
from vhpc_slurm.cli.options import Json
from vhpc_slurm.config import Config
from vhpc_slurm.config.policy import Rule
from vhpc_slurm.policy.rules import image_refusal, matches


def names(as_json: Json = False) -> int:
    """Print the names of the images that you may use here: those of the site, and your own."""
    found = image_names(options.config())
    if as_json:
        output.write_json(found)
    else:
        print("\n".join(found))
    return 0


def image_names(config: Config) -> list[str]:
    """Names of the site's images and of the user's own, without those that the site's rules refuse.

    A rule whose conditions depend on the job (partition, account, QOS) refuses nothing here.
    """
    user = context.user_name()
    found = [ref.label for ref in site_catalog(config.images).refs()]
    if config.images.user_catalog:
        found += [f"own/{ref.label}" for ref in own_catalog(config.images, user).refs()]
    rule = _rule(config.policy, user)
    return [name for name in found if rule is None or not image_refusal(rule, [name])]


def _rule(rules: Iterable[Rule], user: str) -> Rule | None:
    """The rule that applies to each job of a user, whatever its partition, account and QOS."""
    mine = (rule for rule in rules if not rule.users or matches(rule.users, user))
    first = next(mine, None)
    if first is None or first.partitions or first.accounts or first.qos:
        return None
    return first
