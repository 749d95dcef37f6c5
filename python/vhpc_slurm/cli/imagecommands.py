# SPDX-License-Identifier: Apache-2.0
"""Commands of `vhpc image` that share, compare and build images: their arguments and help."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from vhpc_slurm.cli import options
from vhpc_slurm.cli.groups import Catalog, ImageArgument
from vhpc_slurm.cli.options import Json, Labels


def push(
    name: ImageArgument,
    reference: Annotated[str, typer.Argument(metavar="docker://REGISTRY/NAME[:TAG]", show_default=False)],
    catalog: Catalog = None,
    as_json: Json = False,
) -> int:
    """Put an image, with its signatures, into an OCI registry."""
    from vhpc_slurm.cli.images import registry as imageregistry

    config = options.config()
    where = options.catalog(config, catalog, name)
    return imageregistry.push(config.images, where, name, reference, as_json=as_json)


def pull(
    reference: Annotated[
        str, typer.Argument(metavar="docker://REGISTRY/NAME[:TAG][@DIGEST]", show_default=False)
    ],
    target: Annotated[str, typer.Argument(metavar="[own/]NAME[:TAG]", show_default=False)],
    catalog: Catalog = None,
    as_json: Json = False,
) -> int:
    """Get an image that vhpc image push has put into a registry (owner of the catalogue)."""
    from vhpc_slurm.cli.images import registry as imageregistry

    config = options.config()
    where = options.catalog(config, catalog, target)
    return imageregistry.pull(config.images, where, reference, target, as_json=as_json)


def diff(
    before: ImageArgument,
    after: ImageArgument,
    catalog: Catalog = None,
    as_json: Json = False,
) -> int:
    """Show what differs between two images: their manifests, and the files of their roots.

    The exit status is 1 if something differs.
    """
    from vhpc_slurm.cli.images import diff as imagediff

    config = options.config()
    first, second = ((options.catalog(config, catalog, name), name) for name in (before, after))
    return imagediff.diff(config.images, first, second, as_json=as_json)


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
    agent: AnotherAgent = None,
    init: AnotherInit = None,
    label: Labels = None,
    catalog: Catalog = None,
    as_json: Json = False,
) -> None:
    """Build an image from a recipe: a Debian system, its kernel, and the guest agent.

    Without a NAME it goes into the site's catalogue if that is yours, else into your own.
    """
    from vhpc_slurm.cli.images import build as imagebuild

    given = {
        "mirror": mirror,
        "security-mirror": security_mirror,
        "cache": cache,
        "agent": agent,
        "init": init,
    }
    words = [f"--{option}={value}" for option, value in given.items() if value]
    words += [f"--label={text}" for text in label or ()]
    words += ["--refresh"] if refresh else []
    words += ["--json"] if as_json else []
    imagebuild.run(options.config(), recipe, name, catalog, words)


SiteImage = Annotated[str, typer.Argument(metavar="NAME[:TAG][@DIGEST]", show_default=False)]


def stage(
    name: SiteImage,
    peers: Annotated[
        bool, typer.Option("--peers", help="For vhpc image warm, which directs it over standard input.")
    ] = False,
    as_json: Json = False,
) -> int:
    """Copy an image of the site into the store of this node, as Prolog does when a job starts (root)."""
    from vhpc_slurm.cli.images import stage as imagestage

    return imagestage.stage(options.config(), name, as_json=as_json, peers=peers)


def warm(
    name: SiteImage,
    nodes: Annotated[
        str,
        typer.Option("--nodes", "-w", metavar="NODES", help="Such as n[1-16],n20.", show_default=False),
    ],
    parallel: Annotated[
        int, typer.Option("--parallel", metavar="N", min=1, max=1024, help="On how many nodes at once.")
    ] = 16,
    as_json: Json = False,
) -> int:
    """Copy an image of the site into the stores of nodes before jobs need it (root).

    Runs vhpc image stage on each node by srun. With images.peer_port nodes pass the image on to each
    other. The exit status is 1 if it failed on a node.
    """
    from vhpc_slurm.cli.images import stage as imagestage

    return imagestage.warm(options.config(), name, nodes, parallel, as_json=as_json)


def names(as_json: Json = False) -> int:
    """Print the names of the images that you may use here: those of the site, and your own."""
    from vhpc_slurm.cli import complete, output

    found = complete.image_names(options.config())
    if as_json:
        output.write_json(found)
    else:
        print("\n".join(found))
    return 0


COMMANDS: dict[str, Callable[..., int | None]] = {
    "names": names,
    "push": push,
    "pull": pull,
    "diff": diff,
    "build": build,
    "stage": stage,
    "warm": warm,
}
