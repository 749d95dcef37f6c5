# SPDX-License-Identifier: Apache-2.0
"""vhpc image import."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from vhpc_slurm.catalog import own_folder
from vhpc_slurm.cli import context, output
from vhpc_slurm.cli.progress import progress
from vhpc_slurm.config import Config
from vhpc_slurm.config.images import Images
from vhpc_slurm.errors import UserError
from vhpc_slurm.importing.cached import image_of
from vhpc_slurm.importing.imports import import_image
from vhpc_slurm.importing.process import LABEL, OF_VHPC
from vhpc_slurm.importing.source import Source
from vhpc_slurm.model import ImageRef


def resolve(config: Config, source: str) -> str:
    """The image of a source in the caller's own catalogue, imported if need be; errors as ``image_of``."""
    catalog = own_folder(config.images.user_catalog, context.user_name())
    return image_of(config.images, Source.parse(source), catalog, progress)


def print_resolved(config: Config, source: str, *, as_json: bool) -> int:
    """Print the name of that image, with its digest; errors as ``image_of``."""
    name = resolve(config, source)
    if as_json:
        output.write_json({"image": name})
    else:
        print(name)
    return 0


def _labels(texts: Sequence[str]) -> dict[str, str]:
    """Labels as users write them: KEY=VALUE; UserError if one is not."""
    found = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not (equals and LABEL.match(key) and value.isprintable()) or key.startswith(OF_VHPC):
            why = f"KEY=VALUE is expected; a key has a-z, 0-9 and ._/-, and does not begin with {OF_VHPC}"
            raise UserError(f"{text[:80]!r} is not a label", why)
        found[key] = value
    return found


def run(
    images: Images,
    catalog: Path,
    source: str,
    target: str,
    kernel: str,
    labels: Sequence[str] = (),
    *,
    as_json: bool,
) -> int:
    """Import a container or a file tree; errors as ``import_image``."""
    parsed, ref = Source.parse(source), ImageRef.parse(target)
    found = import_image(images, parsed, ref, catalog, kernel, progress, _labels(labels))
    if found.special:
        progress(f"{found.special} devices and pipes were left out")
    if as_json:
        output.write_json(msgspec.to_builtins(found))
    else:
        print(f"{found.image} {found.digest}")
        if not found.changed:
            progress("the name pointed to the same image before")
    return 0
