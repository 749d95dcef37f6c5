# SPDX-License-Identifier: Apache-2.0
"""The commands of `vhpc` that have commands of their own: image, fabric, devices."""

from __future__ import annotations

from typing import Annotated

import typer

from vhpc_slurm.cli import options
from vhpc_slurm.cli.options import Json, ThisNode

image_app = typer.Typer(help="Images of the catalogue.", rich_markup_mode=None)
fabric_app = typer.Typer(help="Partition keys and OpenSM's partitions file.", rich_markup_mode=None)
devices_app = typer.Typer(
    help="GPUs and virtual functions of this node that go to guests.", rich_markup_mode=None
)
GROUPS = {"image": image_app, "fabric": fabric_app, "devices": devices_app}


@fabric_app.callback(invoke_without_command=True)
@image_app.callback(invoke_without_command=True)
def _help(ctx: typer.Context) -> None:
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())
        raise typer.Exit


@devices_app.callback(invoke_without_command=True)
def devices(ctx: typer.Context, node: ThisNode = None, as_json: Json = False) -> int | None:
    """List GPUs and virtual functions of this node that go to guests (root).

    Shown are who holds each, and why one is in quarantine.
    """
    if ctx.invoked_subcommand is not None:
        return None
    from vhpc_slurm.cli import context
    from vhpc_slurm.cli import devices as device_list

    return device_list.ls(options.config(), context.node_name(node), as_json=as_json)


@devices_app.command("clear")
def devices_clear(
    address: Annotated[str, typer.Argument(metavar="ADDRESS", show_default=False)], as_json: Json = False
) -> int:
    """Reset, clear and check a device in quarantine; if that passes, it may be handed out again (root)."""
    from vhpc_slurm.cli import devices as device_list

    return device_list.clear(options.config(), address, as_json=as_json)


@image_app.command("ls")
def image_ls(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="Only the tags of this name."),
    ] = None,
    as_json: Json = False,
) -> int:
    """List images."""
    from vhpc_slurm.cli import images

    return images.ls(options.config(), name, as_json=as_json)


@image_app.command("show")
def image_show(
    name: Annotated[str, typer.Argument(metavar="NAME[:TAG]", show_default=False)], as_json: Json = False
) -> int:
    """Show one image: its digest, blobs, and what it needs."""
    from vhpc_slurm.cli import images

    return images.show(options.config(), name, as_json=as_json)


@fabric_app.command("ls")
def fabric_ls(as_json: Json = False) -> int:
    """List the partition keys that are not free: whose, and in which state (root, on vhpcd's host)."""
    from vhpc_slurm.cli import fabric

    return fabric.ls(options.config(), as_json=as_json)


What = Annotated[
    str,
    typer.Argument(
        metavar="KEY|JOB",
        help="A key (0x1000, vlan100, vni5000), a job id, or a generation.",
        show_default=False,
    ),
]


@fabric_app.command("show")
def fabric_show(what: What, as_json: Json = False) -> int:
    """Show who has a key: lease, nodes and what they said last, ports (root, on vhpcd's host)."""
    from vhpc_slurm.cli import fabric

    return fabric.show(options.config(), what, as_json=as_json)


@fabric_app.command("fence")
def fabric_fence(
    node: Annotated[str, typer.Argument(metavar="NODE", show_default=False)],
    yes: Annotated[bool, typer.Option("--yes", help="The node is off: do not ask.")] = False,
    as_json: Json = False,
) -> int:
    """Say that a node is OFF, so that keys of ended jobs wait for it no more (root or SlurmUser)."""
    from vhpc_slurm.cli import fabric

    return fabric.fence(options.config(), node, yes=yes, as_json=as_json)


@fabric_app.command("clear")
def fabric_clear(what: What, as_json: Json = False) -> int:
    """Lift a tombstone, when no port of the fabric has its key any more (root, on vhpcd's host)."""
    from vhpc_slurm.cli import fabric

    return fabric.clear(options.config(), what, as_json=as_json)


@fabric_app.command("audit")
def fabric_audit(as_json: Json = False) -> int:
    """Compare partitions file and port tables with the keys in use; exit 1 if anything differs (root)."""
    from vhpc_slurm.cli import fabric

    return fabric.audit(options.config(), as_json=as_json)


@fabric_app.command("render")
def fabric_render(
    pool: Annotated[
        bool, typer.Option("--pool", help="The file of the static pool: all keys, from the configuration.")
    ] = False,
    install: Annotated[
        bool,
        typer.Option("--install", help="Print nothing: have vhpcd write the file, and the fabric read it."),
    ] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="With --install: also where that takes keys away which the database does not know.",
        ),
    ] = False,
    as_json: Json = False,
) -> int:
    """Print the partitions file that the keys in use make (root, on vhpcd's host)."""
    if (install and pool) or (force and not install):
        raise typer.BadParameter("--force goes with --install, and --pool with neither")
    from vhpc_slurm.cli import fabric

    if install:
        return fabric.install(options.config(), force=force, as_json=as_json)
    return fabric.render(options.config(), pool=pool, as_json=as_json)


@fabric_app.command("manager")
def fabric_manager() -> int:
    """Let a vhpcd on another host speak to this host's OpenSM: lines of JSON on stdin and stdout."""
    from vhpc_slurm.cli import fabric_manager as manager

    return manager.manager(options.config())


@fabric_app.command("lint")
def fabric_lint(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A partitions file.", show_default=False)],
    as_json: Json = False,
) -> int:
    """Check a partitions file for all that OpenSM would take amiss, line by line; exit 1 if there is any."""
    from vhpc_slurm.cli import fabric

    return fabric.lint(file, as_json=as_json)
