# SPDX-License-Identifier: Apache-2.0
"""vhpc image import, resolve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import msgspec
import typer

from vhpc_slurm.catalog import own_catalog
from vhpc_slurm.cli import context, options, output
from vhpc_slurm.cli.options import CatalogFolder, Json, Labels, NewImage
from vhpc_slurm.cli.progress import progress
from vhpc_slurm.config import Config
from vhpc_slurm.errors import UserError
from vhpc_slurm.importing.cached import image_of
from vhpc_slurm.importing.imports import import_image
from vhpc_slurm.importing.process import LABEL, OF_VHPC
from vhpc_slurm.importing.source import INDEXED, Source
from vhpc_slurm.model import ImageRef


def resolve_source(config: Config, source: str) -> str:
    """The image of a source in the caller's own catalogue, imported if need be; errors as ``image_of``."""
    catalog = own_catalog(config.images, context.user_name())
    return image_of(config.images, Source.parse(source), catalog.path, progress, config.host.commands)


def resolve(
    source: Annotated[
        str,
        typer.Argument(metavar="SOURCE", help="docker://NAME or KIND:PATH.", show_default=False),
    ],
    as_json: Json = False,
) -> int:
    """Print the image of a source in your own catalogue, with its digest; import it if it is not there."""
    name = resolve_source(options.config(), source)
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


Arch = Annotated[
    str,
    typer.Option(
        "--arch",
        metavar="ARCH",
        help="Architecture of the image: x86_64 or aarch64, if the kernel's image has both; "
        "default: this host's.",
        show_default=False,
    ),
]


def import_(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="docker://NAME, oci:DIR[:NAME], oci-archive:FILE[:NAME], docker-archive:FILE[:NAME], "
            "a tar file (.tar, .tar.gz, .tgz, .tar.zst), a folder, or a disk with a system: qcow2:FILE, "
            "raw:FILE, vmdk:FILE.",
            show_default=False,
        ),
    ],
    target: NewImage,
    kernel: Annotated[
        str,
        typer.Option(
            "--kernel",
            metavar="IMAGE",
            help="Image of the site whose kernel is used; default: images.import_kernel.",
            show_default=False,
        ),
    ] = "",
    variant: Annotated[
        str,
        typer.Option(
            "--variant",
            metavar="VARIANT",
            help="Of several images for the architecture, that for this variant, such as v3; default: the "
            "lowest.",
            show_default=False,
        ),
    ] = "",
    arch: Arch = "",
    label: Labels = None,
    catalog: CatalogFolder = None,
    as_json: Json = False,
) -> int:
    """Make an image of a container or of a file tree (owner of the catalogue)."""
    config = options.config()
    where = options.catalog(config, catalog, target)
    parsed, ref = replace(Source.parse(source), variant=variant), ImageRef.parse(target)
    if variant and parsed.kind not in INDEXED:
        forms = "docker://NAME, oci:DIR and oci-archive:FILE"
        raise UserError(f"{parsed} has no variants", f"--variant is for {forms}", "leave it out")
    own, commands = _labels(label or ()), config.host.commands
    found = import_image(config.images, parsed, ref, where.path, kernel, progress, own, commands, arch)
    if found.special:
        progress(f"{found.special} devices and pipes were left out")
    if as_json:
        output.write_json(msgspec.to_builtins(found))
    else:
        print(f"{found.image} {found.digest}")
        if not found.changed:
            progress("the name pointed to the same image before")
    return 0
