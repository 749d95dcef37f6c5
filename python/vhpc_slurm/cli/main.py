# SPDX-License-Identifier: Apache-2.0
"""The `vhpc` command: its verbs, its exit status, its errors."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from vhpc_slurm import __version__
from vhpc_slurm.cli import options
from vhpc_slurm.cli.progress import end as end_progress
from vhpc_slurm.cli.verbs import PASS_ALL, PASS_OPTIONS, Group, Verb, print_help
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

VERBS = (
    Verb("ps", "jobs.ps:ps", short_help="List jobs with guests."),
    Verb("shell", "jobs.shell:shell", short_help="Start a shell in a guest.", settings=PASS_OPTIONS),
    Verb("save", "jobs.save:save", short_help="Make an image of a running job's guest."),
    Verb("checkpoint", "jobs.checkpoints:GROUP", "Checkpoints: the saved state of a job's guests."),
    Verb("cluster", "jobs.clusters:GROUP", "Clusters: jobs whose guests are on one network."),
    Verb("forward", "jobs.forward:forward", short_help="Reach a port of a guest from this host."),
    Verb("ssh", "jobs.ssh:ssh", short_help="Open an ssh session in a guest.", settings=PASS_ALL),
    Verb("ssh-config", "jobs.ssh:ssh_config", short_help="Let scp, rsync and editors reach a guest."),
    Verb("cp", "jobs.cp:cp", short_help="Copy files into a guest or out of it."),
    Verb("environment", "jobs.environment:environment", short_help="Print the options of a file for sbatch."),
    Verb("complete", "complete:complete", hidden=True, settings={"ignore_unknown_options": True}),
    Verb("plan", "host.plan:plan", short_help="Show the plan of Prolog on this node."),
    Verb("inventory", "host.inventory:inventory", short_help="Show the hardware of this node."),
    Verb("timeline", "jobs.timeline:timeline", short_help="Show how long a job's boot took, stage by stage."),
    Verb("seff", "jobs.seff:seff", short_help="Show what a job's programs have used."),
    Verb("console", "jobs.console:console", short_help="Print what a guest wrote to its console."),
    Verb("report", "jobs.report:report", short_help="Show what is known of a job."),
    Verb("web", "web.command:web", short_help="Show jobs, nodes and keys in a browser."),
    Verb("boot-watch", "jobs.bootline:watch", hidden=True),
    Verb("doctor", "host.doctor:doctor", short_help="Check this host and Slurm's settings."),
    Verb("reconcile", "host.reconcile:reconcile", short_help="Repair what a crash left on this node."),
    Verb("node-setup", "host.nodesetup:node_setup", short_help="Prepare this node before slurmd starts."),
    Verb("node", "host.nodedrain:GROUP", "Nodes of the cluster, while their jobs run."),
    Verb("setup", "host.setup:setup", short_help="Set this host up as node, controller or login host."),
    Verb("config", "site.configuration:config", short_help="Show the configuration."),
    Verb("image", "images:GROUP", "Images of the catalogue."),
    Verb("fabric", "fabric:GROUP", "Partition keys and OpenSM's partitions file."),
    Verb("devices", "host.devices:GROUP", "GPUs and virtual functions of this node for guests."),
    Verb("bench", "bench:GROUP", "Acceptance test: the speed of guests as a part of native speed."),
    Verb("policy", "site:POLICY", "Rules of the site: what jobs may ask for, and what they get."),
    Verb("share", "site:SHARE", "Snapshots of shared folders, which guests mount from a disk."),
    Verb("database", "site:DATABASE", "vhpcd's database, while vhpcd does not run."),
)


def _vhpc(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        print(f"vhpc {__version__}")
        raise typer.Exit
    print_help(ctx)


COMMAND = Group(*VERBS, callback=_vhpc).command(
    "vhpc",
    "Virtual clusters inside Slurm jobs: show jobs, guests, images and settings.",
    epilog=EXIT_CODES,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status, prints errors as one line."""
    try:
        try:
            result = COMMAND.main(
                args=None if argv is None else list(argv), prog_name="vhpc", standalone_mode=False
            )
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
