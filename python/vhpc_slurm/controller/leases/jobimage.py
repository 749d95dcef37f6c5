# SPDX-License-Identifier: Apache-2.0
"""The image of a job: by name and architecture of its nodes, or of the checkpoint that it continues."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from vhpc_slurm import policy
from vhpc_slurm.catalog import Owner, SeveralArchitecturesError, resolve_for
from vhpc_slurm.config import Config
from vhpc_slurm.errors import FabricError, UserError
from vhpc_slurm.model import ImageIdentity, ImageRef, JobRequest


def look_up(
    config: Config, request: JobRequest, architectures: Mapping[str, str] = MappingProxyType({})
) -> ImageIdentity | UserError:
    """The image that a job's request means now, or the user's error: also that the policy refuses the job.

    ``architectures`` has those of the job's nodes, as far as they are known.

    Raises:
        FabricError: the catalogue of the site is unreadable, or signatures cannot be checked.
    """
    try:
        ref = ImageRef.parse(str(request.image))
        arch = _common(architectures)
        owner = Owner(request.user, request.uid)
        image = resolve_for(config.images, ref, owner, arch, config.guests.emulated)
        policy.check(config, request, image)
        return image
    except SeveralArchitecturesError as err:
        why = "Slurm does not tell the architecture of its nodes"
        raise FabricError(f"the image of job {request.job_id} cannot be chosen", why) from err
    except UserError as err:
        return err


def _common(architectures: Mapping[str, str]) -> str:
    """The architecture of all nodes, empty if it is not known; UserError if they have several."""
    nodes: dict[str, str] = {}
    for node, arch in sorted(architectures.items()):
        nodes.setdefault(arch, node)
    if len(nodes) > 1:
        found = " and ".join(f"{arch} (such as {node})" for arch, node in sorted(nodes.items()))
        raise UserError(
            "the job's nodes have several architectures",
            found,
            "an image is for one: ask for nodes of one, with --constraint or --partition",
        )
    return next(iter(nodes), "")


def check_saved(config: Config, request: JobRequest, image: ImageIdentity) -> ImageIdentity | UserError:
    """The image of a checkpoint that a job continues, or the error that the policy no longer permits it.

    Raises:
        FabricError: signatures cannot be checked.
    """
    try:
        policy.check(config, request, image)
        return image
    except UserError as err:
        return err
