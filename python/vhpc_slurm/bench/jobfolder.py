# SPDX-License-Identifier: Apache-2.0
"""The folder of one call: programs and inputs, and a folder for each job with its parameters and results."""

from __future__ import annotations

import shlex
import shutil
import tempfile
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Literal

from vhpc_slurm.bench.catalogue import Benchmark
from vhpc_slurm.bench.outputs import MISSING, Figures, OutputError, pairs, parse, reason
from vhpc_slurm.bench.wish import Wish
from vhpc_slurm.errors import UserError

Side = Literal["native", "guest"]
PROGRAMS = ("vhpc-measure", "vhpc-measure-mpi")
SCRIPT = "job.sh"
INPUTS = (SCRIPT, "lj.in", "hpccinf.in")
MAX_OUTPUT = 1 << 20


@dataclass(frozen=True)
class Outcome:
    """The result of one test in one job.

    Attributes:
        figures: its results; None if it failed or did not run.
        problem: why there are no figures, one line.
        missing: whether its program or library is not installed there.
    """

    figures: Figures | None
    problem: str = ""
    missing: bool = False


class JobFolder:
    """A new folder below ``parent``, which nodes and guests must see under the same name."""

    def __init__(self, parent: Path, libexec: Path) -> None:
        """Create the folder and copy the programs.

        Raises:
            UserError: the folder cannot be created, or the programs are not installed.
        """
        try:
            self.path = Path(tempfile.mkdtemp(prefix="vhpc-bench-", dir=parent.absolute()))
        except OSError as err:
            raise UserError(
                f"cannot create a folder in {parent}", err.strerror or str(err), "see: --dir"
            ) from err
        try:
            for name in PROGRAMS:
                shutil.copyfile(libexec / name, self.path / name)
                (self.path / name).chmod(0o755)
            for name in INPUTS:
                source = resources.files("vhpc_slurm.bench") / "files" / name
                (self.path / name).write_bytes(source.read_bytes())
        except OSError as err:
            self.remove()
            raise UserError(
                f"cannot copy {Path(err.filename or '').name} to {self.path}",
                err.strerror or str(err),
                f"install vhpc's programs in {libexec} of this host, or choose another --dir",
            ) from err

    def job(self, wish: Wish, number: int, side: Side) -> Path:
        """Create the folder of one job with its parameters."""
        path = self.path / f"round{number}-{side}"
        path.mkdir(mode=0o700)
        (path / "parameters").write_text(parameters(wish, side), encoding="utf-8")
        return path

    def remove(self) -> None:
        """Remove the folder with everything in it."""
        shutil.rmtree(self.path, ignore_errors=True)


def parameters(wish: Wish, side: Side) -> str:
    """Assignments for job.sh."""
    values: dict[str, object] = {
        "TESTS": " ".join(test.name for test in wish.tests),
        "SETUP": wish.native_setup if side == "native" else wish.guest_setup,
        "MPI": wish.mpi,
        "LIBRARY": "openmpi" if wish.mpi.startswith("pmix") else "mpich",
        "NODES": wish.nodes,
        "TASKS": "" if wish.tasks is None else wish.tasks,
    }
    values |= {name.upper().replace("-", "_"): value for name, value in wish.sizes.items()}
    return "".join(f"{name}={shlex.quote(str(value))}\n" for name, value in values.items())


def facts(job: Path, name: str) -> dict[str, str]:
    """Names and values that the job wrote about its ``machine`` or ``shape``; empty without that file."""
    return pairs(_read(job / f"{name}.out"))


def outcome(job: Path, test: Benchmark) -> Outcome:
    """The result of a test, from the files of its job, which has ended."""
    setup = setup_problem(job)
    if setup:
        return Outcome(None, setup)
    status = _status(job, test.name)
    if status is None:
        return Outcome(None, "the job ended before this test did")
    said = reason(_read(job / f"{test.name}.err"))
    if status != 0:
        return Outcome(None, said or f"exit status {status}", status in MISSING)
    ranks = facts(job, "shape").get("ranks", "")
    try:
        return Outcome(parse(test, _read(job / f"{test.name}.out"), int(ranks) if ranks.isdecimal() else 0))
    except OutputError as err:
        return Outcome(None, str(err))


def setup_problem(job: Path) -> str:
    """Why the setup command failed; empty if it succeeded or was not run."""
    status = _status(job, "setup")
    if status in (None, 0):
        return ""
    return f"the setup command failed: {reason(_read(job / 'setup.err')) or f'exit status {status}'}"


def _status(job: Path, name: str) -> int | None:
    text = _read(job / f"{name}.status").strip()
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 4 else None


def _read(path: Path) -> str:
    """A file up to MAX_OUTPUT bytes; empty if it does not exist."""
    try:
        with path.open("rb") as file:
            return file.read(MAX_OUTPUT).decode(errors="replace")
    except OSError:
        return ""


def job_error(job: Path) -> str:
    """The most informative line of the job's own output; empty if it printed nothing."""
    return reason(_read(job / "job.out"))
