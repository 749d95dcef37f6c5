# SPDX-License-Identifier: Apache-2.0
"""Whether an image has a driver for the GPUs of a job.  Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from vhpc_slurm.config.images import REQUIREMENT
from vhpc_slurm.model import Allocation, ImageIdentity


@dataclass(frozen=True)
class Driver:
    """A driver that an image needs for GPUs of a type; an empty type means all."""

    gpu_type: str
    module: str
    version: str
    exact: bool = False

    @classmethod
    def parse(cls, text: str) -> Driver:
        """Parse an item of ``images.gpu_drivers``; ValueError if it has another form."""
        match = re.match(REQUIREMENT, text, re.ASCII)
        if match is None:
            raise ValueError(f"{text!r} is not [TYPE:]MODULE[>=VERSION|==VERSION]")
        return cls(match[1] or "", match[2], match[4] or "", match[3] == "==")

    def is_in(self, image: ImageIdentity) -> bool:
        """Whether the image has this driver; one of unknown version is older than any."""
        manifest = image.manifest
        if self.module not in manifest.drivers:
            return False
        found = dict(manifest.driver_versions).get(self.module, "")
        if self.exact:
            return found == self.version
        return not self.version or _number(found) >= _number(self.version)

    def __str__(self) -> str:
        sign = "==" if self.exact else ">="
        return f"{self.module} {sign} {self.version}" if self.version else self.module


def missing(allocation: Allocation, image: ImageIdentity, gres: str, required: Sequence[str]) -> str:
    """Why the image cannot drive the job's GPUs, as one line for the user; empty if it can.

    Args:
        allocation: of the job.
        image: of the job.
        gres: Slurm's name of the generic resource for GPUs.
        required: ``images.gpu_drivers``; a GPU needs one of those for its type.  GPUs of a type without
            any need none.
    """
    drivers = [Driver.parse(text) for text in required]
    versions = dict(image.manifest.driver_versions)
    types = {one.type for part in allocation.nodes for one in part.gres if one.name == gres and one.count}
    for kind in sorted(types):
        fitting = [one for one in drivers if one.gpu_type in ("", kind)]
        if fitting and not any(one.is_in(image) for one in fitting):
            has = [
                f"{name} {versions.get(name) or 'of unknown version'}"
                for name in dict.fromkeys(one.module for one in fitting)
                if name in image.manifest.drivers
            ]
            gpus = f"GPUs of type {kind}" if kind else "the GPUs"
            needs = " or ".join(map(str, fitting))
            return (
                f"image {image.ref} cannot drive {gpus} of this job: it needs {needs} and has "
                f"{' and '.join(has) or 'no such driver'} (choose another image, see: vhpc image show)"
            )
    return ""


def _number(version: str) -> tuple[int, ...]:
    """The numbers that a version begins with: ``570.86.15`` is (570, 86, 15)."""
    match = re.match(r"[0-9]+(?:\.[0-9]+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()
