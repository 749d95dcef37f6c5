# SPDX-License-Identifier: Apache-2.0
"""Arguments of `vhpc bench`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vhpc_slurm.cli import options
from vhpc_slurm.cli.options import Json

if TYPE_CHECKING:
    from vhpc_slurm.bench.catalogue import Scope

bench_app = typer.Typer(
    help="Acceptance test: the speed of guests as a part of native speed.", rich_markup_mode=None
)

Image = Annotated[
    str,
    typer.Option("--image", metavar="NAME[:TAG]", help="Image of the guests; it should have the programs."),
]
Tests = Annotated[
    str | None,
    typer.Option(
        "--tests", metavar="LIST", help="Only these tests, like triad,files; one that cannot run fails."
    ),
]
Rounds = Annotated[
    int,
    typer.Option(
        "--rounds", metavar="N", min=1, max=100, help="Rounds: a native job and one with guests each."
    ),
]
Size = Annotated[
    list[str] | None,
    typer.Option("--size", metavar="NAME=N", help="Size of a test, see vhpc(1); may be repeated."),
]
Mpi = Annotated[
    str, typer.Option("--mpi", metavar="TYPE", help="srun's --mpi: pmix for Open MPI, pmi2 for MPICH.")
]
Tasks = Annotated[
    int | None,
    typer.Option("--ntasks-per-node", metavar="N", min=1, help="MPI ranks per node; default one per CPU."),
]
Minutes = Annotated[
    int, typer.Option("--time", metavar="MINUTES", min=1, max=100000, help="Time limit of each job.")
]
Queue = Annotated[
    int,
    typer.Option("--queue-timeout", metavar="SECONDS", min=1, help="How long a job may wait in the queue."),
]
Sbatch = Annotated[
    list[str] | None,
    typer.Option(
        "--sbatch",
        metavar="OPTION",
        help="Option of sbatch for all jobs, like --partition=test; may be repeated.",
    ),
]
GuestSbatch = Annotated[
    list[str] | None,
    typer.Option(
        "--guest-sbatch", metavar="OPTION", help="Option of sbatch for jobs with guests, like --vhpc-vfs=1."
    ),
]
NativeSetup = Annotated[
    str,
    typer.Option("--native-setup", metavar="COMMAND", help="Shell command that runs first in native jobs."),
]
GuestSetup = Annotated[
    str, typer.Option("--guest-setup", metavar="COMMAND", help="Shell command that runs first in guests.")
]
Folder = Annotated[
    Path | None,
    typer.Option(
        "--dir", metavar="DIR", help="Where the jobs work, on all nodes; default your home directory."
    ),
]
Keep = Annotated[bool, typer.Option("--keep", help="Do not remove the outputs of the tests.")]
Svg = Annotated[
    str | None, typer.Option("--svg", metavar="FILE", help="Write a picture to FILE; - is standard output.")
]


@bench_app.callback(invoke_without_command=True)
def _help(ctx: typer.Context) -> None:
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())
        raise typer.Exit


@bench_app.command("node")
def node(
    image: Image = "debian-hpc",
    tests: Tests = None,
    rounds: Rounds = 3,
    size: Size = None,
    mpi: Mpi = "pmix",
    tasks: Tasks = None,
    minutes: Minutes = 60,
    queue: Queue = 3600,
    sbatch: Sbatch = None,
    guest_sbatch: GuestSbatch = None,
    native_setup: NativeSetup = "",
    guest_setup: GuestSetup = "",
    folder: Folder = None,
    keep: Keep = False,
    svg: Svg = None,
    as_json: Json = False,
) -> int:
    """Compare one node with a guest on it: memory bandwidth, files of home, LAMMPS, HPCC.

    Submits jobs that use a whole node, with your rights.
    The exit status is 1 when a test failed or, if --tests names it, did not run.
    """
    return _bench("node", nodes=1, **locals())


@bench_app.command("job")
def job(
    nodes: Annotated[
        int, typer.Option("--nodes", "-N", metavar="N", min=2, max=4096, help="Number of nodes.")
    ] = 2,
    image: Image = "debian-hpc",
    tests: Tests = None,
    rounds: Rounds = 3,
    size: Size = None,
    mpi: Mpi = "pmix",
    tasks: Tasks = None,
    minutes: Minutes = 60,
    queue: Queue = 3600,
    sbatch: Sbatch = None,
    guest_sbatch: GuestSbatch = None,
    native_setup: NativeSetup = "",
    guest_setup: GuestSetup = "",
    folder: Folder = None,
    keep: Keep = False,
    svg: Svg = None,
    as_json: Json = False,
) -> int:
    """Compare several nodes with guests on them: MPI ping-pong and allreduce, LAMMPS, HPCC, files of home.

    Submits jobs that use whole nodes, with your rights.
    The exit status is 1 when a test failed or, if --tests names it, did not run.
    """
    return _bench("job", **locals())


def _bench(
    scope: Scope,
    *,
    nodes: int,
    image: str,
    tests: str | None,
    rounds: int,
    size: list[str] | None,
    mpi: str,
    tasks: int | None,
    minutes: int,
    queue: int,
    sbatch: list[str] | None,
    guest_sbatch: list[str] | None,
    native_setup: str,
    guest_setup: str,
    folder: Path | None,
    keep: bool,
    svg: str | None,
    as_json: bool,
) -> int:
    """What both commands do; the parameters have the names of theirs."""
    if svg == "-" and as_json:
        raise typer.BadParameter("--svg - and --json cannot both write to standard output")
    from vhpc_slurm.bench import wish
    from vhpc_slurm.cli.bench import acceptance as bench

    wanted = wish.Wish(
        scope=scope,
        image=image,
        nodes=nodes,
        tests=wish.choose(scope, tests),
        named=tests is not None,
        rounds=rounds,
        sizes=wish.sizes(size or ()),
        mpi=mpi,
        tasks=tasks,
        minutes=minutes,
        queue_s=queue,
        sbatch=tuple(sbatch or ()),
        guest_sbatch=tuple(guest_sbatch or ()),
        native_setup=native_setup,
        guest_setup=guest_setup,
    )
    return bench.bench(
        options.config(), wanted, folder=folder or Path.home(), keep=keep, svg=svg, as_json=as_json
    )
