# SPDX-License-Identifier: Apache-2.0
"""vhpc bench node, job: run the acceptance test and show its report."""

from __future__ import annotations

import errno
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from vhpc_slurm.bench import published
from vhpc_slurm.bench.catalogue import Scope
from vhpc_slurm.bench.compare import figure, part
from vhpc_slurm.bench.jobfolder import JobFolder
from vhpc_slurm.bench.plot import draw
from vhpc_slurm.bench.report import Report, Result, document, report
from vhpc_slurm.bench.run import Run, rounds
from vhpc_slurm.bench.wish import Wish, choose
from vhpc_slurm.bench.wish import sizes as parse_sizes
from vhpc_slurm.catalog import site_catalog
from vhpc_slurm.cli import options, output
from vhpc_slurm.cli.options import Json
from vhpc_slurm.config import Config
from vhpc_slurm.errors import UserError, VhpcError
from vhpc_slurm.model import ImageRef
from vhpc_slurm.slurm import user_jobs
from vhpc_slurm.terminal import one_line

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
    return _compare("node", nodes=1, **locals())


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
    return _compare("job", **locals())


def _compare(
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
    """The work of both commands; the parameters have the names of theirs."""
    if svg == "-" and as_json:
        raise typer.BadParameter("--svg - and --json cannot both write to standard output")
    from vhpc_slurm.bench import wish

    wanted = wish.Wish(
        scope=scope,
        image=image,
        nodes=nodes,
        tests=choose(scope, tests),
        named=tests is not None,
        rounds=rounds,
        sizes=parse_sizes(size or ()),
        mpi=mpi,
        tasks=tasks,
        minutes=minutes,
        queue_s=queue,
        sbatch=tuple(sbatch or ()),
        guest_sbatch=tuple(guest_sbatch or ()),
        native_setup=native_setup,
        guest_setup=guest_setup,
    )
    return _run(options.config(), wanted, folder=folder or Path.home(), keep=keep, svg=svg, as_json=as_json)


def _run(config: Config, wish: Wish, *, folder: Path, keep: bool, svg: str | None, as_json: bool) -> int:
    """Run all rounds, print the report; 1 if a test failed.

    Raises:
        UserError: the image is unknown, the site has no network for jobs, Slurm refused the first job.
        SlurmError: Slurm does not answer, before there is any result.
        KeyboardInterrupt: the running job is cancelled, and the folder stays.
    """
    _check(config, wish)
    _writable(svg)
    jobs = user_jobs(config)
    place = JobFolder(folder, Path(config.paths.libexec))
    runs: list[Run] = []
    failure = ""
    try:
        for run in rounds(wish, place, jobs, _say):
            runs.append(run)
    except VhpcError as err:
        if not runs:
            place.remove()
            raise
        failure = err.line()
    except KeyboardInterrupt:
        _say(f"interrupted; outputs of the tests are in {place.path}")
        raise
    done = report(wish, runs, failure)
    stays = keep or not done.passed
    if stays:
        done = replace(done, folder=str(place.path))
    else:
        place.remove()
    if svg is not None:
        _write(svg, draw(done))
    if as_json:
        output.write_json(document(done))
    elif svg != "-":
        _show(done)
    return 0 if done.passed else 1


def _check(config: Config, wish: Wish) -> None:
    """Raise the errors that are known before a job waits in the queue."""
    ref = ImageRef.parse(wish.image)
    catalogue = site_catalog(config.images)
    if not ref.own and catalogue.path.is_dir():  # a login host may have no access; then the job reports it
        catalogue.all_of(ref)
    if wish.nodes > 1 and "job" not in config.network.allowed:
        raise UserError(
            "vhpc bench job needs --vhpc-network=job, which this site does not allow",
            "",
            'add "job" to network.allowed in vhpc.toml of all hosts, see docs/network.md',
        )


def _writable(svg: str | None) -> None:
    """UserError if the picture could not be written after hours of tests; leaves no empty file."""
    if svg in (None, "-"):
        return
    path = Path(str(svg))
    try:
        if path.exists():
            path.open("a", encoding="utf-8").close()
        elif not path.parent.is_dir():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        elif not os.access(path.parent, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as err:
        raise UserError(f"cannot write {svg}", err.strerror or str(err)) from err


def _write(svg: str, picture: str) -> None:
    if svg == "-":
        sys.stdout.write(picture)
    else:
        Path(svg).write_text(picture, encoding="utf-8")


def _say(line: str) -> None:
    print(f"vhpc: {one_line(line)}", file=sys.stderr, flush=True)


def _show(done: Report) -> None:
    for warning in done.warnings:
        print(f"warning: {one_line(warning)}")
    rows = [
        (
            one.test.name,
            f"{comparison.metric.title} ({comparison.metric.unit})",
            figure(comparison.native.median),
            f"{figure(comparison.native.low)} to {figure(comparison.native.high)}",
            figure(comparison.guest.median),
            f"{figure(comparison.guest.low)} to {figure(comparison.guest.high)}",
            part(comparison.efficiency),
            f"{part(comparison.low)} to {part(comparison.high)}",
            _published(done, one, comparison.metric.key),
        )
        for one in done.tests
        for comparison in one.comparisons
    ]
    if rows:
        heads = (
            "TEST",
            "MEASURE",
            "NATIVE",
            "ROUNDS",
            "GUEST",
            "ROUNDS",
            "EFFICIENCY",
            "ROUNDS",
            "PUBLISHED",
        )
        output.write_table(heads, rows, right=("NATIVE", "GUEST", "EFFICIENCY", "PUBLISHED"))
    for one in done.tests:
        for problem in one.problems:
            print(f"{one.test.name}: {_status(one)}: {one_line(problem)}")
    if done.failure:
        print(f"failed: {one_line(done.failure)}")
    if done.folder:
        print(f"outputs of the tests: {done.folder}")
    print("efficiency: guest/native for rates, native/guest for times; 1.00 is native speed, lower is slower")
    print(f"published, with KVM: {published.SUMMARY}")


def _status(one: Result) -> str:
    return {"measured": "some rounds failed", "missing": "not run", "failed": "failed"}[one.status]


def _published(done: Report, one: Result, key: str) -> str:
    found = published.published(one.test.name, key, done.wish.nodes)
    return "-" if found is None else f"{found.efficiency:.2f}"
