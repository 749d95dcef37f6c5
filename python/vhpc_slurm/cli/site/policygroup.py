# SPDX-License-Identifier: Apache-2.0
"""The commands `vhpc policy`: what the site permits to which jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from vhpc_slurm.cli import disksize, options
from vhpc_slurm.cli.options import Json

if TYPE_CHECKING:
    from vhpc_slurm.cli.site.policy import Wish
    from vhpc_slurm.policy import Subject

policy_app = typer.Typer(
    help="Rules of the site: what jobs may ask for, and what they get.", rich_markup_mode=None
)

User = Annotated[
    str, typer.Option("--user", metavar="USER", help="User of the job; default: you.", show_default=False)
]
Partition = Annotated[
    str | None, typer.Option("--partition", metavar="P", help="Its partition.", show_default=False)
]
Account = Annotated[
    str | None, typer.Option("--account", metavar="A", help="Its account.", show_default=False)
]
Qos = Annotated[str | None, typer.Option("--qos", metavar="Q", help="Its QOS.", show_default=False)]
Network = Annotated[
    str | None,
    typer.Option("--network", metavar="NETWORK", help="Its --vhpc-network.", show_default=False),
]
Image = Annotated[
    str | None,
    typer.Option("--image", metavar="[own/]NAME[:TAG][@DIGEST]", help="Its image.", show_default=False),
]
Disk = Annotated[disksize.Disk | None, disksize.option("Its --vhpc-disk.")]
Batch = Annotated[
    str | None,
    typer.Option("--batch", metavar="guest|host", help="Its --vhpc-batch.", show_default=False),
]
Guests = Annotated[
    int | None,
    typer.Option("--guests-per-node", metavar="N", help="Its --vhpc-guests-per-node.", show_default=False),
]
Vfs = Annotated[int | None, typer.Option("--vfs", metavar="N", help="Its --vhpc-vfs.", show_default=False)]
Timeout = Annotated[
    int | None, typer.Option("--timeout", metavar="SECONDS", help="Its --vhpc-timeout.", show_default=False)
]
Show = Annotated[bool, typer.Option("--show", help="Print what the job gets, and who has set it.")]


@policy_app.callback(invoke_without_command=True)
def _help(ctx: typer.Context) -> None:
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())
        raise typer.Exit


def _subject(user: str, partition: str | None, account: str | None, qos: str | None) -> Subject:
    from vhpc_slurm.cli import context
    from vhpc_slurm.policy import Subject

    return Subject(user or context.user_name(), partition, account, qos)


def _wish(
    image: str | None,
    network: str | None,
    disk: disksize.Disk | None,
    batch: str | None,
    guests: int | None,
    vfs: int | None,
    timeout: int | None,
) -> Wish:
    from vhpc_slurm.cli.site.policy import Wish
    from vhpc_slurm.policy.limits import Asked

    words = None if network is None else tuple(network.split(","))
    mib, mount = (None, "") if disk is None else (disk.mib, disk.mount)
    return Wish(image, Asked(words, mib, batch, guests, vfs, timeout, mount))


@policy_app.command("explain")
def explain(
    user: User = "",
    partition: Partition = None,
    account: Account = None,
    qos: Qos = None,
    image: Image = None,
    network: Network = None,
    disk: Disk = None,
    batch: Batch = None,
    guests_per_node: Guests = None,
    vfs: Vfs = None,
    timeout: Timeout = None,
    as_json: Json = False,
) -> int:
    """Show which rule applies to a job, what it permits, and which values it sets.

    If partition, account or QOS are not given, all rules that may apply are shown. With --image,
    --network and other options of the job, each of them says whether it permits these.
    """
    from vhpc_slurm.cli.site import policy

    subject = _subject(user, partition, account, qos)
    wish = _wish(image, network, disk, batch, guests_per_node, vfs, timeout)
    return policy.explain(options.config(), subject, wish, as_json=as_json)


@policy_app.command("check")
def check(
    user: User = "",
    partition: Partition = None,
    account: Account = None,
    qos: Qos = None,
    image: Image = None,
    network: Network = None,
    disk: Disk = None,
    batch: Batch = None,
    guests_per_node: Guests = None,
    vfs: Vfs = None,
    timeout: Timeout = None,
    show: Show = False,
    as_json: Json = False,
) -> int:
    """Exit with status 1, and one line, if no rule that may apply permits the job; else print nothing.

    With --show, print what the job gets: the values of its options, of rules, and of the site.
    """
    from vhpc_slurm.cli.site import policy

    subject = _subject(user, partition, account, qos)
    wish = _wish(image, network, disk, batch, guests_per_node, vfs, timeout)
    return policy.check(options.config(), subject, wish, show=show, as_json=as_json)
