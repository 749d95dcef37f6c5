# SPDX-License-Identifier: Apache-2.0
"""The commands of `vhpc` that have subcommands: image, fabric, devices, bench, policy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vhpc_slurm.cli import options
from vhpc_slurm.cli.bench.benchgroup import bench_app
from vhpc_slurm.cli.options import Json, Labels, ThisNode
from vhpc_slurm.cli.site.databasegroup import database_app
from vhpc_slurm.cli.site.policygroup import policy_app

image_app = typer.Typer(help="Images of the catalogue.", rich_markup_mode=None)
fabric_app = typer.Typer(help="Partition keys and OpenSM's partitions file.", rich_markup_mode=None)
devices_app = typer.Typer(help="GPUs and virtual functions of this node for guests.", rich_markup_mode=None)
GROUPS = {
    "image": image_app,
    "fabric": fabric_app,
    "devices": devices_app,
    "bench": bench_app,
    "policy": policy_app,
    "database": database_app,
}


@fabric_app.callback(invoke_without_command=True)
@image_app.callback(invoke_without_command=True)
def _help(ctx: typer.Context) -> None:
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())
        raise typer.Exit


@devices_app.callback(invoke_without_command=True)
def devices(ctx: typer.Context, node: ThisNode = None, as_json: Json = False) -> int | None:
    """List GPUs and virtual functions of this node for guests (root).

    Shows which generation holds each one, and why one is in quarantine.
    """
    if ctx.invoked_subcommand is not None:
        return None
    from vhpc_slurm.cli import context
    from vhpc_slurm.cli.host import devices as device_list

    return device_list.ls(options.config(), context.node_name(node), as_json=as_json)


@devices_app.command("clear")
def devices_clear(
    address: Annotated[str, typer.Argument(metavar="ADDRESS", show_default=False)], as_json: Json = False
) -> int:
    """Reset, clear and check a device in quarantine; if it passes, jobs may get it again (root)."""
    from vhpc_slurm.cli.host import devices as device_list

    return device_list.clear(options.config(), address, as_json=as_json)


Catalog = Annotated[
    Path | None,
    typer.Option(
        "--catalog", metavar="DIR", help="Another catalogue; default: images.catalog.", show_default=False
    ),
]
Own = Annotated[bool, typer.Option("--own", help="Your own catalogue (images.user_catalog).")]
ImageArgument = Annotated[str, typer.Argument(metavar="[own/]NAME[:TAG][@DIGEST]", show_default=False)]


@image_app.command("ls")
def image_ls(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="Only the tags of this name."),
    ] = None,
    own: Own = False,
    catalog: Catalog = None,
    as_json: Json = False,
) -> int:
    """List the images of the site; with --own, yours."""
    from vhpc_slurm.cli.images import listing as images

    config = options.config()
    where = options.catalog(config, catalog, *([name] if name else []), own=own)
    is_own = own or (name or "").startswith("own/")
    return images.ls(config, where, name, own=is_own, as_json=as_json)


@image_app.command("show")
def image_show(name: ImageArgument, catalog: Catalog = None, as_json: Json = False) -> int:
    """Show one image: its digest, what its manifest says, and its blobs."""
    from vhpc_slurm.cli.images import listing as images

    config = options.config()
    return images.show(config, options.catalog(config, catalog, name), name, as_json=as_json)


@image_app.command("import")
def image_import(
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
    target: Annotated[str, typer.Argument(metavar="[own/]NAME[:TAG]", show_default=False)],
    kernel: Annotated[
        str,
        typer.Option(
            "--kernel",
            metavar="IMAGE",
            help="Image of the site whose kernel is used; default: images.import_kernel.",
            show_default=False,
        ),
    ] = "",
    label: Labels = None,
    catalog: Catalog = None,
    as_json: Json = False,
) -> int:
    """Make an image of a container or of a file tree (owner of the catalogue)."""
    from vhpc_slurm.cli.images import imports as imageimport

    config = options.config()
    where = options.catalog(config, catalog, target)
    return imageimport.run(config.images, where, source, target, kernel, label or (), as_json=as_json)


@image_app.command("resolve")
def image_resolve(
    source: Annotated[
        str,
        typer.Argument(metavar="SOURCE", help="docker://NAME or KIND:PATH.", show_default=False),
    ],
    as_json: Json = False,
) -> int:
    """Print the image of a source in your own catalogue, with its digest; import it if it is not there."""
    from vhpc_slurm.cli.images import imports as imageimport

    return imageimport.print_resolved(options.config(), source, as_json=as_json)


@image_app.command("tag")
def image_tag(
    source: ImageArgument,
    target: Annotated[str, typer.Argument(metavar="[own/]NEW[:TAG]", show_default=False)],
    catalog: Catalog = None,
    as_json: Json = False,
) -> int:
    """Let the name NEW point to an image (owner of the catalogue)."""
    from vhpc_slurm.cli.images import edit as imageedit

    where = options.catalog(options.config(), catalog, source, target)
    return imageedit.tag(where, source, target, as_json=as_json)


@image_app.command("rm")
def image_rm(
    names: Annotated[list[str], typer.Argument(metavar="[own/]NAME[:TAG]...", show_default=False)],
    catalog: Catalog = None,
    as_json: Json = False,
) -> int:
    """Remove names (owner of the catalogue); vhpc image gc deletes images that have lost their last one."""
    from vhpc_slurm.cli.images import edit as imageedit

    return imageedit.rm(options.catalog(options.config(), catalog, *names), names, as_json=as_json)


@image_app.command("verify")
def image_verify(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[[own/]NAME[:TAG][@DIGEST]...]", help="Default: all.", show_default=False),
    ] = None,
    user: Annotated[
        str,
        typer.Option(
            "--for", metavar="USER", help="Also check the policy, for jobs of USER.", show_default=False
        ),
    ] = "",
    partition: Annotated[
        str | None, typer.Option("--partition", help="The same for jobs of a partition.", show_default=False)
    ] = None,
    account: Annotated[
        str | None, typer.Option("--account", help="The same for jobs of an account.", show_default=False)
    ] = None,
    qos: Annotated[
        str | None, typer.Option("--qos", help="The same for jobs of a QOS.", show_default=False)
    ] = None,
    own: Own = False,
    catalog: Catalog = None,
    as_json: Json = False,
) -> int:
    """Compare all bytes of images with their digests, and show who has signed them.

    With --for, --partition, --account or --qos, images are also compared with the policy: with all
    rules that may apply, where something of the job is not given. The exit status is 1 if an image is
    broken, or permitted by none of them.
    """
    from vhpc_slurm.cli import context
    from vhpc_slurm.cli.images import edit as imageedit
    from vhpc_slurm.policy import Subject

    config = options.config()
    where = options.catalog(config, catalog, *(names or ()), own=own)
    subject = None
    if user or any(given is not None for given in (partition, account, qos)):
        subject = Subject(user or context.user_name(), partition, account, qos)
    return imageedit.verify(config, where, names or (), subject, own=own, as_json=as_json)


@image_app.command("sign")
def image_sign(
    name: ImageArgument,
    key: Annotated[
        Path | None,
        typer.Option(
            "--key",
            metavar="FILE",
            help="Private key, or the public key of one in the ssh-agent; ssh-keygen(1) makes the signature.",
            show_default=False,
        ),
    ] = None,
    signature: Annotated[
        Path | None,
        typer.Option(
            "--signature", metavar="FILE", help="A signature that was made elsewhere.", show_default=False
        ),
    ] = None,
    catalog: Catalog = None,
    as_json: Json = False,
) -> int:
    """Add a signature to an image (owner of the catalogue)."""
    if (key is None) == (signature is None):
        raise typer.BadParameter("one of --key and --signature is needed")
    from vhpc_slurm.cli.images import edit as imageedit

    where = options.catalog(options.config(), catalog, name)
    return imageedit.sign(where, name, key, signature, as_json=as_json)


@image_app.command("gc")
def image_gc(
    days: Annotated[
        float,
        typer.Option("--days", metavar="N", min=0, help="For how long images without a name are kept."),
    ] = 7.0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Change nothing; show what would be deleted.")
    ] = False,
    own: Own = False,
    catalog: Catalog = None,
    as_json: Json = False,
) -> int:
    """Delete images that have had no name for some days, and their blobs (owner of the catalogue).

    The first run that finds an image without a name starts the count of days; run it daily.
    """
    from vhpc_slurm.cli.images import edit as imageedit

    where = options.catalog(options.config(), catalog, own=own)
    return imageedit.gc(where, days, dry_run=dry_run, as_json=as_json)


@fabric_app.command("ls")
def fabric_ls(as_json: Json = False) -> int:
    """List the partition keys that are not free, with job and state (root, on vhpcd's host)."""
    from vhpc_slurm.cli.fabric import keys as fabric

    return fabric.ls(options.config(), as_json=as_json)


What = Annotated[
    str,
    typer.Argument(
        metavar="KEY|JOB",
        help="A key (0x1000, vlan100), a job id, or a generation.",
        show_default=False,
    ),
]


@fabric_app.command("show")
def fabric_show(what: What, as_json: Json = False) -> int:
    """Show which job has a key: lease, nodes and their last report, ports (root, on vhpcd's host)."""
    from vhpc_slurm.cli.fabric import keys as fabric

    return fabric.show(options.config(), what, as_json=as_json)


@fabric_app.command("fence")
def fabric_fence(
    node: Annotated[str, typer.Argument(metavar="NODE", show_default=False)],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask whether the node is off.")] = False,
    as_json: Json = False,
) -> int:
    """Declare that a node is OFF, so that keys of ended jobs need not wait for it (root or SlurmUser)."""
    from vhpc_slurm.cli.fabric import keys as fabric

    return fabric.fence(options.config(), node, yes=yes, as_json=as_json)


@fabric_app.command("clear")
def fabric_clear(what: What, as_json: Json = False) -> int:
    """Remove a key's tombstone if no port of the fabric has that key (root, on vhpcd's host)."""
    from vhpc_slurm.cli.fabric import keys as fabric

    return fabric.clear(options.config(), what, as_json=as_json)


@fabric_app.command("audit")
def fabric_audit(as_json: Json = False) -> int:
    """Compare partitions file and port tables with the keys in use; exit 1 if anything differs (root)."""
    from vhpc_slurm.cli.fabric import keys as fabric

    return fabric.audit(options.config(), as_json=as_json)


@fabric_app.command("render")
def fabric_render(
    pool: Annotated[
        bool,
        typer.Option("--pool", help="The file of the static pool: all keys, from the configuration."),
    ] = False,
    install: Annotated[
        bool,
        typer.Option("--install", help="Print nothing: vhpcd writes the file, and OpenSM reads it."),
    ] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="With --install: even if this removes keys that vhpcd's database does not have.",
        ),
    ] = False,
    as_json: Json = False,
) -> int:
    """Print the partitions file for the keys in use (root, on vhpcd's host)."""
    if (install and pool) or (force and not install):
        raise typer.BadParameter("--force needs --install, and --pool excludes both")
    from vhpc_slurm.cli.fabric import keys as fabric

    if install:
        return fabric.install(options.config(), force=force, as_json=as_json)
    return fabric.render(options.config(), pool=pool, as_json=as_json)


@fabric_app.command("manager")
def fabric_manager() -> int:
    """Serve this host's OpenSM to a vhpcd on another host: lines of JSON on stdin and stdout."""
    from vhpc_slurm.cli.fabric import manager

    return manager.manager(options.config())


@fabric_app.command("lint")
def fabric_lint(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A partitions file.", show_default=False)],
    as_json: Json = False,
) -> int:
    """Check a partitions file for lines that OpenSM rejects or misreads; exit 1 if there is one."""
    from vhpc_slurm.cli.fabric import keys as fabric

    return fabric.lint(file, as_json=as_json)
