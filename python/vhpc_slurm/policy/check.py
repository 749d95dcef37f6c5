# SPDX-License-Identifier: Apache-2.0
"""Whether a job may run with an image and a network: the first refusal, as an error for its user."""

from __future__ import annotations

from collections.abc import Sequence

from vhpc_slurm.catalog import Catalog, Owner, Signed, catalog_for
from vhpc_slurm.config import Config
from vhpc_slurm.config.policy import Rule
from vhpc_slurm.errors import UserError
from vhpc_slurm.model import ImageIdentity, JobRequest
from vhpc_slurm.options import NETWORK
from vhpc_slurm.policy import signatures
from vhpc_slurm.policy.limits import option_refusal
from vhpc_slurm.policy.rules import Subject, applying, image_refusal, signer_refusal


class PolicyError(UserError):
    """A rule of the site refuses the job."""


def check(config: Config, request: JobRequest, image: ImageIdentity) -> None:
    """Raise unless the policy permits a job that asks for an image.

    Raises:
        PolicyError: a rule refuses it; the message names the rule.
        FabricError: signatures cannot be checked.
    """
    subject = Subject.of(request)
    rule = applying(config.policy, subject)
    if rule is None:
        return
    words = config.network.parts(request.network, request.implies_job_network)
    _check_network(rule, ",".join(words))
    owner = Owner(request.user, request.uid) if image.ref.own else None
    check_image(config, rule, image, catalog_for(config.images, owner))


def _check_network(rule: Rule, asked: str) -> None:
    """Raise unless a rule permits a job's network.

    Args:
        rule: the rule that applies.
        asked: the words of the network that the job has, with commas between them.

    Raises:
        PolicyError: it does not.
    """
    refusal = option_refusal(rule, NETWORK, asked)
    if refusal:
        raise PolicyError(f"policy rule {rule.name!r} refuses the job", refusal)


def check_image(
    config: Config,
    rule: Rule,
    image: ImageIdentity,
    catalog: Catalog,
    signed: Signed | None = None,
    prefix: Sequence[str] = (),
) -> None:
    """Raise unless a rule permits an image.

    Args:
        config: has the files with the signers.
        rule: the rule that applies.
        image: the image.
        catalog: has its names, which are not read for a user's own image: its name is what its owner says.
        signed: its manifest and signatures; None: those in ``catalog``.
        prefix: of the command that checks them (``signatures.check``).

    Raises:
        PolicyError, FabricError: as ``check``.
    """
    refusal = image_refusal(rule, [image.ref.label] if image.ref.own else catalog.labels(image))
    why = ""
    if not refusal and rule.signers:
        found = signatures.check(config.images, signed or catalog.read_signed(image), prefix)
        refusal, why = signer_refusal(rule, found.principals), found.refused
    if refusal:
        refusal += f"; {why}" if why else ""
        raise PolicyError(f"policy rule {rule.name!r} does not permit image {image.ref}", refusal)
