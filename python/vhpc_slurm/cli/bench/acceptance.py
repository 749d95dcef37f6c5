# SPDX-License-Identifier: Apache-2.0
"""vhpc bench: run the acceptance test and show its report."""

from __future__ import annotations

import errno
import os
import sys
from dataclasses import replace
from pathlib import Path

from vhpc_slurm.bench import published
from vhpc_slurm.bench.compare import figure, part
from vhpc_slurm.bench.jobfolder import JobFolder
from vhpc_slurm.bench.plot import draw
from vhpc_slurm.bench.report import Report, Result, document, report
from vhpc_slurm.bench.run import Run, rounds
from vhpc_slurm.bench.wish import Wish
from vhpc_slurm.catalog import resolve
from vhpc_slurm.cli import output
from vhpc_slurm.config import Config
from vhpc_slurm.errors import UserError, VhpcError
from vhpc_slurm.model import ImageRef
from vhpc_slurm.slurm import user_jobs
from vhpc_slurm.terminal import one_line


def bench(config: Config, wish: Wish, *, folder: Path, keep: bool, svg: str | None, as_json: bool) -> int:
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
    """What can be known before a job waits in the queue."""
    ref = ImageRef.parse(wish.image)
    catalogue = Path(config.images.catalog)
    if not ref.own and catalogue.is_dir():  # a login host may have no access to it; then the job says so
        resolve(catalogue, ref)
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
