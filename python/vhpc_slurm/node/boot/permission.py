# SPDX-License-Identifier: Apache-2.0
"""Whether this node permits the image of a job: the policy of vhpc.toml here, and signatures as read here.

vhpcd has asked the same before it made the lease. This node believes the lease who the job's user is, and
its partition, account and QOS; it does not believe it what a name or a digest means, or who has signed.
"""
# Decision: Nodes ask the policy again

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace

from vhpc_slurm.catalog import FolderCatalog, blobs, identity, site_catalog
from vhpc_slurm.config.policy import Rule
from vhpc_slurm.errors import FabricError
from vhpc_slurm.model import ImageIdentity
from vhpc_slurm.node.boot.state import Boot
from vhpc_slurm.node.host import process
from vhpc_slurm.node.store import manifests
from vhpc_slurm.policy import PolicyError, Subject, applying, check_image

NOBODY = 65534
"""Runs ssh-keygen, which parses what a user has written; needs an account, and has no rights."""


class RefusedHereError(PolicyError):
    """A rule of this node refuses what vhpcd has permitted.

    Attributes:
        cause: the same for all jobs that the rule refuses, for operators.
    """

    def __init__(self, node: str, rule: Rule, error: PolicyError) -> None:
        super().__init__(
            f"{error.what} on {node}",
            error.why,
            f"vhpc.toml or the signers of {node} differ from those of vhpcd, which has permitted it, or have "
            "changed since; tell the site's support",
        )
        self.cause = f"policy rule {rule.name!r} of the node refuses what vhpcd has permitted"


def check(work: Boot) -> Generator[None, None, ImageIdentity]:
    """Check the image of a lease by this node's policy; a generator that yields during a long wait.

    Returns the image as this node has read it; as the lease has it if no rule applies to the job.

    Raises:
        RefusedHereError: a rule refuses the image.
        UserError: the manifest is missing, damaged, or cannot be read with the user's rights.
        FabricError: the lease has other files than the manifest of its digest, the name of the image means
            another one now, or the catalogue or the files of signers cannot be read.
    """
    config, image, node = work.layout.config, work.image, work.plan.node
    subject = replace(Subject.of(work.lease.request), user=work.account.name)
    rule = applying(config.policy, subject)
    if rule is None:
        return image
    with work.recorder.stage("policy", rule.name):
        signed = yield from manifests.read(work.layout, image, work.account)
        found = identity(image.ref, image.digest, signed.manifest)
        if _files(found) != _files(image):
            raise FabricError(
                f"the lease of the job has other files than image {image}",
                f"{node} has compared it with the manifest in the catalogue",
                "is vhpcd sound, and its database?",
            )
        catalog = site_catalog(config.images)
        _check_name(catalog, rule, image, node)
        nobody = process.drop_to(process.Credentials(NOBODY, NOBODY))
        try:
            check_image(config, rule, image, catalog, signed, nobody)
        except PolicyError as err:
            raise RefusedHereError(node, rule, err) from err
        except FabricError as err:
            raise FabricError(f"{err.what} on {node}", err.why, err.hint) from err
    return found


def _files(image: ImageIdentity) -> list[tuple[str, int, str]]:
    return [(blob.sha256, blob.size, blob.chunks) for blob in blobs(image.manifest)]


def _check_name(catalog: FolderCatalog, rule: Rule, image: ImageIdentity, node: str) -> None:
    """Raise FabricError if the rule is about names, and the image's name does not mean this image now.

    The names of an image that was asked for by its digest are looked up by ``check_image``; names in
    users' own catalogues are what their owners say.
    """
    if image.ref.own or image.ref.digest or "*" in rule.images:
        return
    try:
        now = catalog.pointed(image.ref).get(image.manifest.arch, "")
    except OSError as err:
        now = f"nothing: {err.strerror}"
    if now != image.digest:
        raise FabricError(
            f"image {image.ref.label} is not {image.digest}, which the lease of the job has",
            f"on {node} the name means {now or 'nothing'} now",
            "an image that has got another meaning since is right in the next lease",
        )
