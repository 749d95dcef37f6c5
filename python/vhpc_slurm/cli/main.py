# SPDX-License-Identifier: Apache-2.0
"""The `vhpc` command: its subcommands and options; the other modules of this package implement them.

Each command imports its module when it runs: `vhpc --help` must not wait for
libvirt, and `vhpc image ls` not for the client of vhpcd.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from vhpc_slurm import __version__
from vhpc_slurm.cli import disksize, guestcommands, imagecommands, jobcommands, options, setupcommand
from vhpc_slurm.cli.groups import GROUPS
from vhpc_slurm.cli.options import JobId, Json, ThisNode
from vhpc_slurm.cli.progress import end as end_progress
from vhpc_slurm.cli.web import command as webcommand
from vhpc_slurm.errors import VhpcError
from vhpc_slurm.terminal import one_line

EXIT_BY_KIND = {"user": 1, "node": 3, "teardown": 3, "fabric": 4}
EXIT_USAGE = 2
EXIT_INTERNAL = 70
EXIT_INTERRUPTED = 130
EXIT_CODES = (
    "Exit status: 0 success; 1 a mistake in your request, or findings (doctor, reconcile, fabric); "
    "2 wrong usage; 3 a failure of this node; 4 vhpcd or Slurm cannot be reached. "
    "Errors are one line on stderr."
)

app = typer.Typer(
    name="vhpc",
    help="Virtual clusters inside Slurm jobs: show jobs, guests, images and settings.",
    epilog=EXIT_CODES,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for name, group in GROUPS.items():
    app.add_typer(group, name=name)
for name, command in imagecommands.COMMANDS.items():
    GROUPS["image"].command(name)(command)


@app.callback(invoke_without_command=True)
def _vhpc(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        print(f"vhpc {__version__}")
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())
        raise typer.Exit


@app.command(short_help="List jobs with guests.")
def ps(
    everything: Annotated[bool, typer.Option("--all", help="Also generations that have ended.")] = False,
    local: Annotated[bool, typer.Option("--local", help="Guests of this node, from its journals.")] = False,
    as_json: Json = False,
) -> int:
    """List your jobs with guests (root: all), from vhpcd, or from this node's journals (root)."""
    if local and everything:
        raise typer.BadParameter("--all and --local exclude each other")
    from vhpc_slurm.cli.jobs import ps as jobs

    if local:
        return jobs.ps_local(options.config(), as_json=as_json)
    return jobs.ps(options.config(), everything=everything, as_json=as_json)


app.command(
    short_help="Start a shell in a guest.",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)(guestcommands.shell)
GROUPS["image"].command(
    "run",
    short_help="The same as vhpc shell.",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)(guestcommands.shell)
app.command(short_help="Make an image of a running job's guest.")(guestcommands.save)
app.command(short_help="Reach a port of a guest from this host.")(guestcommands.forward)
app.command(short_help="Copy files into a guest or out of it.")(guestcommands.cp)
app.command("complete", hidden=True, context_settings={"ignore_unknown_options": True})(
    guestcommands.complete
)


# Options of `vhpc plan`
JobHere = Annotated[
    int | None,
    typer.Argument(metavar="JOBID", min=1, help="A job on this node; its lease gives its allocation."),
]
ImageName = Annotated[
    str | None,
    typer.Option(
        "--image", metavar="NAME[:TAG][@DIGEST]", help="Without JOBID: the image of a job that you describe."
    ),
]
CpuIds = Annotated[
    str | None,
    typer.Option("--cpus", metavar="LIST", help="With --image: Slurm's CPU ids, like 0-3,8; default all."),
]
MemoryMib = Annotated[
    int | None,
    typer.Option("--memory", metavar="MIB", min=1, help="With --image: memory of the job here; default all."),
]
MemReserve = Annotated[
    int | None,
    typer.Option("--mem-reserve", metavar="MIB", min=0, help="With --image: as sbatch --vhpc-mem-reserve."),
]
UserName = Annotated[
    str | None,
    typer.Option(
        "--user", metavar="USER", help="With --image: user of the job; default you, unless you are root."
    ),
]
WorkDir = Annotated[
    str | None,
    typer.Option(
        "--chdir",
        metavar="DIR",
        help="With --image: working directory of the job; default here.",
    ),
]
GpuIndexes = Annotated[
    str | None,
    typer.Option("--gpus", metavar="LIST", help="With --image: indexes of the GPUs that Slurm allocates."),
]
VfCount = Annotated[
    int | None,
    typer.Option("--vfs", metavar="N", min=0, help="With --image: number of virtual functions."),
]
GuestCount = Annotated[
    int | None,
    typer.Option("--guests-per-node", metavar="K", min=1, help="With --image: number of guests."),
]
DiskSize = Annotated[disksize.Disk | None, disksize.option("With --image: as sbatch --vhpc-disk.")]
AsXml = Annotated[bool, typer.Option("--xml", help="Print the libvirt domain XML of each guest.")]


@app.command(short_help="Show the plan of Prolog on this node.")
def plan(
    job_id: JobHere = None,
    image: ImageName = None,
    cpus: CpuIds = None,
    memory: MemoryMib = None,
    mem_reserve: MemReserve = None,
    user: UserName = None,
    chdir: WorkDir = None,
    gpus: GpuIndexes = None,
    vfs: VfCount = None,
    guests_per_node: GuestCount = None,
    disk: DiskSize = None,
    xml: AsXml = False,
    node: ThisNode = None,
    as_json: Json = False,
) -> int:
    """Show the plan of Prolog on this node, for a job or for one that you describe; or why it is refused."""
    wishes = (image, cpus, memory, mem_reserve, user, chdir, gpus, vfs, guests_per_node, disk)
    if (job_id is None) == (image is None):
        raise typer.BadParameter("either JOBID or --image is needed")
    if job_id is not None and any(wish is not None for wish in wishes):
        raise typer.BadParameter("JOBID excludes --cpus, --memory and the like: the job has its allocation")
    from vhpc_slurm.cli import context
    from vhpc_slurm.cli.host import plan as planning

    config, name = options.config(), context.node_name(node)
    if job_id is not None:
        case = planning.of_job(config, job_id, name)
    else:
        wish = planning.Wish(
            image or "",
            cpus,
            memory,
            mem_reserve,
            user,
            chdir or os.getcwd(),  # noqa: PTH109
            gpus,
            vfs,
            guests_per_node or 1,
            None if disk is None else disk.mib,
            "" if disk is None else disk.mount,
        )
        case = planning.of_wish(config, wish, name)
    return planning.plan(config, case, xml=xml, as_json=as_json)


@app.command(short_help="Show the hardware of this node.")
def inventory(
    sysfs_root: Annotated[
        str | None,
        typer.Option(
            "--sysfs-root",
            metavar="DIR",
            help="Another machine: a copy of its /sys, with its /proc in the same folder.",
        ),
    ] = None,
    svg: Annotated[
        str | None,
        typer.Option("--svg", metavar="FILE", help="Write a picture to FILE; - is standard output."),
    ] = None,
    node: ThisNode = None,
    as_json: Json = False,
) -> int:
    """Show sockets, cores, caches, NUMA cells, memory and PCI devices; on this node also their holders.

    Only root sees what guests hold.
    """
    if svg == "-" and as_json:
        raise typer.BadParameter("--svg - and --json cannot both write to standard output")
    from vhpc_slurm.cli import context
    from vhpc_slurm.cli.host import inventory as inventories

    return inventories.inventory(
        options.config(), context.node_name(node), sysfs_root=sysfs_root, svg=svg, as_json=as_json
    )


@app.command(short_help="Show how long a job's boot took, stage by stage.")
def timeline(
    job_id: JobId,
    node: Annotated[
        str | None,
        typer.Option("--node", metavar="NODE", help="Only this node of the job."),
    ] = None,
    as_json: Json = False,
) -> int:
    """Show the stages of a job's boot and teardown on each node, with durations.

    Nodes send their stages when the guests are ready, and again when the job ends.
    """
    from vhpc_slurm.cli.jobs import timeline as waterfall

    return waterfall.timeline(options.config(), job_id, node, as_json=as_json)


@app.command(short_help="Show what a job's programs have used.")
def seff(job_id: JobId, as_json: Json = False) -> int:
    """Show CPU time, memory and I/O of a job's programs, by step, as the guests measured them.

    Of a running job: so far, until the last health check of its nodes.
    Users see their own jobs, root and SlurmUser all. sacct and seff only see the relays on the nodes.
    """
    from vhpc_slurm.cli.jobs import seff as efficiency

    return efficiency.seff(options.config(), job_id, as_json=as_json)


app.command(short_help="Print what a guest wrote to its console.")(jobcommands.console)
app.command(short_help="Show what is known of a job.")(jobcommands.report)
app.command(short_help="Show jobs, nodes and keys in a browser.")(webcommand.web)
app.command("boot-watch", hidden=True)(jobcommands.boot_watch)


@app.command(short_help="Check this host and Slurm's settings.")
def doctor(
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show only warnings and errors.")] = False,
    node: ThisNode = None,
    as_json: Json = False,
) -> int:
    """Check this host and Slurm's settings; each finding comes with a hint.

    Run it as root on the controller, on a login node and on every compute node.
    The exit status is 1 when a finding is an error.
    """
    from vhpc_slurm.cli import context
    from vhpc_slurm.cli.host import doctor as doctors

    return doctors.doctor(options.config(), context.node_name(node), as_json=as_json, quiet=quiet)


@app.command(short_help="Repair what a crash left on this node.")
def reconcile(
    check: Annotated[
        bool, typer.Option("--check", help="Change nothing; exit 1 when there is a finding.")
    ] = False,
    node: ThisNode = None,
    as_json: Json = False,
) -> int:
    """Repair what a crash left on this node (root).

    Compares journals, libvirt, processes and vhpcd's leases.  The exit status
    is 0 when there is no finding or all are repaired, else 1.
    """
    from vhpc_slurm.cli import context
    from vhpc_slurm.cli.host import reconcile as reconciliation

    return reconciliation.reconcile(options.config(), context.node_name(node), check=check, as_json=as_json)


@app.command("node-setup", short_help="Prepare this node before slurmd starts.")
def node_setup(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Change nothing; exit 1 when something is missing.")
    ] = False,
    as_json: Json = False,
) -> int:
    """Create virtual functions, pools of huge pages, and /dev/vhpc/gpuN for gres.conf (root).

    Existing ones are not changed.  The unit vhpc-node-setup.service
    runs this at boot, before slurmd.  The exit status is 3 when a step failed.
    """
    from vhpc_slurm.cli.host import nodesetup

    return nodesetup.node_setup(options.config(), dry_run=dry_run, as_json=as_json)


app.command(short_help="Set this host up as node, controller or login host.")(setupcommand.setup)


@app.command(short_help="Show the configuration.")
def config(
    describe: Annotated[
        bool, typer.Option("--describe", help="Show every key, its default and its meaning.")
    ] = False,
    man: Annotated[bool, typer.Option("--man", help="Print the man page vhpc.toml(5).")] = False,
    as_json: Json = False,
) -> int:
    """Show the configuration: every key with its value."""
    if man and (describe or as_json):
        raise typer.BadParameter("--man excludes all other options")
    from vhpc_slurm.cli.site import settings

    if man:
        sys.stdout.write(settings.manual())
        return 0
    if describe:
        return settings.reference(as_json=as_json)
    return settings.values(options.config(), as_json=as_json)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status, prints errors as one line."""
    try:
        try:
            result = app(args=None if argv is None else list(argv), prog_name="vhpc", standalone_mode=False)
        finally:
            end_progress()
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except VhpcError as err:
        return _fail(_with_near_names(err).line(), EXIT_BY_KIND.get(err.kind, EXIT_INTERNAL))
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    except (BrokenPipeError, SystemExit) as err:
        # typer turns a broken pipe into SystemExit
        if isinstance(err, SystemExit) and not isinstance(err.__context__, BrokenPipeError):
            raise
        # the reader closed the pipe; the interpreter must not fail when it flushes stdout at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as err:
        message = getattr(err, "format_message", None)
        if message is not None:  # errors of click, which typer may bundle under another name
            return _fail(f"{message()} (see: vhpc --help)", EXIT_USAGE)
        if os.environ.get("VHPC_DEBUG"):
            raise
        return _fail(f"internal error: {err!r} (VHPC_DEBUG=1 shows where)", EXIT_INTERNAL)


def _with_near_names(err: VhpcError) -> VhpcError:
    """Of an unknown image, commands have looked into one catalogue: the user may mean one of the other."""
    from vhpc_slurm.catalog import Owner, UnknownImageError, other_names
    from vhpc_slurm.cli import context

    if not isinstance(err, UnknownImageError):
        return err
    with contextlib.suppress(VhpcError):
        owner = Owner(context.user_name(), os.geteuid())
        return err.among(other_names(options.config().images, owner, own=not err.own))
    return err


def _fail(line: str, code: int) -> int:
    print(f"vhpc: {one_line(line)}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
