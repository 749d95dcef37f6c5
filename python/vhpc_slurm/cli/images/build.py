# SPDX-License-Identifier: Apache-2.0
"""vhpc image build: finds the image builder and a catalogue, and becomes the builder."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import typer

import vhpc_slurm
from vhpc_slurm.catalog import FolderCatalog, own_catalog, site_catalog
from vhpc_slurm.catalog.changes import check_new_name
from vhpc_slurm.cli import context, options
from vhpc_slurm.cli.options import CatalogFolder, Json, Labels
from vhpc_slurm.config import Config
from vhpc_slurm.errors import UserError
from vhpc_slurm.model import ImageRef

BUILDER = "vmimages/build"
CHECKOUT = Path(vhpc_slurm.__file__).parents[2]
"""The source tree, if this package is in one."""


Arch = Annotated[
    str,
    typer.Option(
        "--arch",
        metavar="ARCH",
        help="x86_64 or aarch64; default: the recipe's, else this host's.",
        show_default=False,
    ),
]
AnotherAgent = Annotated[
    Path | None, typer.Option("--agent", metavar="FILE", help="Another vhpc-agent.", show_default=False)
]
AnotherInit = Annotated[
    Path | None, typer.Option("--init", metavar="FILE", help="Another vhpc-init.", show_default=False)
]


def build(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE",
            help="A recipe's file, or the name of one that came with vhpc, such as debian-minimal.",
            show_default=False,
        ),
    ],
    name: Annotated[
        str | None,
        typer.Argument(metavar="[own/]NAME[:TAG]", help="Default: name and tag of the recipe."),
    ] = None,
    refresh: Annotated[
        bool, typer.Option("--refresh", help="Ignore the cache and install current packages.")
    ] = False,
    mirror: Annotated[
        str, typer.Option("--mirror", metavar="URL", help="Debian mirror.", show_default=False)
    ] = "",
    security_mirror: Annotated[
        str,
        typer.Option(
            "--security-mirror",
            metavar="URL",
            help="Mirror of Debian's security updates.",
            show_default=False,
        ),
    ] = "",
    cache: Annotated[
        Path | None,
        typer.Option("--cache", metavar="DIR", help="Cache of finished bases.", show_default=False),
    ] = None,
    arch: Arch = "",
    agent: AnotherAgent = None,
    init: AnotherInit = None,
    label: Labels = None,
    catalog: CatalogFolder = None,
    as_json: Json = False,
) -> NoReturn:
    """Build an image from a recipe: a Debian system, its kernel, and the guest agent.

    Without a NAME it goes into the site's catalogue if that is yours, else into your own.
    """
    given = {
        "mirror": mirror,
        "security-mirror": security_mirror,
        "cache": cache,
        "arch": arch,
        "agent": agent,
        "init": init,
    }
    words = [f"--{option}={value}" for option, value in given.items() if value]
    words += [f"--label={text}" for text in label or ()]
    words += ["--refresh"] if refresh else []
    words += ["--json"] if as_json else []
    _become_builder(options.config(), recipe, name, catalog, words)


def _become_builder(
    config: Config, recipe: str, name: str | None, catalog: Path | None, words: Sequence[str]
) -> NoReturn:
    """Replace this process by the builder.

    Args:
        config: the configuration.
        recipe: a file, or the name of a recipe in the builder's folder.
        name: ``[own/]NAME[:TAG]``; None: those of the recipe.
        catalog: ``--catalog``.
        words: further options of the builder.

    Raises:
        UserError: this host has no builder, there is no such recipe, or the name is not valid.
    """
    builder = _builder(Path(config.paths.libexec))
    where, is_own = _catalog(config, name, catalog)
    argv = [sys.executable, str(builder), str(_recipe(builder, recipe)), f"--output={where}", *words]
    if name is not None:
        ref = ImageRef.parse(name)
        check_new_name(ref)
        argv += [f"--name={ref.name}", f"--tag={ref.tag}"]
    argv += ["--own"] if is_own else []
    sys.stdout.flush()
    os.execv(argv[0], argv)  # noqa: S606 - no shell, and nothing of the user's is a program


def _builder(libexec: Path) -> Path:
    places = (CHECKOUT / BUILDER, libexec / BUILDER)
    found = next((path for path in places if path.is_file()), None)
    if found is None:
        raise UserError(
            "this host has no image builder",
            f"{places[-1]} does not exist",
            "install the package vhpc-image-tools, or the C parts of vhpc with cmake (docs/install.md)",
        )
    return found


def _recipe(builder: Path, recipe: str) -> Path:
    """The file of a recipe; a name without a slash that is no file is one of the builder's."""
    path = Path(recipe)
    if "/" in recipe or path.exists():
        return path.absolute()
    folder = builder.parent / "recipes"
    found = folder / f"{recipe}.toml"
    if not found.is_file():
        names = ", ".join(sorted(path.stem for path in folder.glob("*.toml")))
        raise UserError(f"there is no recipe {recipe!r}", "no file has this name", f"vhpc has: {names}")
    return found


def _catalog(config: Config, name: str | None, given: Path | None) -> tuple[FolderCatalog, bool]:
    """The catalogue for the image, and whether it is the user's own."""
    if name is not None or given is not None:
        where = options.catalog(config, given, *([] if name is None else [name]))
        return where, name is not None and ImageRef.parse(name).own
    site = site_catalog(config.images)
    try:
        is_mine = context.is_root() or site.path.stat().st_uid == os.geteuid()
    except OSError:
        is_mine = False
    if is_mine:
        return site, False
    return own_catalog(config.images, context.user_name()), True
