# SPDX-License-Identifier: Apache-2.0
"""Daemons of Open MPI's mpirun that srun has started and lost: mpirun does not return 0."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from guest_rig import Guest

pytest_plugins = ["guest_rig"]

# As mpirun of Open MPI 5.0.7 (prrte, plm_slurm_module.c): it discards what srun writes, and returns 0
# whatever srun returns; after SIGTERM it returns 1. In argv: what it starts.
MPIRUN = """
import signal, subprocess, sys
code = 0
def end(number, frame):
    global code
    code = 1
signal.signal(signal.SIGTERM, end)
null = subprocess.DEVNULL
subprocess.run(sys.argv[1:], stdin=null, stdout=null, stderr=null)
print("mpirun ends", file=sys.stderr)
sys.exit(code)
"""
LOST = "vhpc: the guest of job 5 on n2 is gone"


@pytest.fixture
def srun(tmp_path: Path) -> dict[str, str]:
    """The host's srun: prints a line and returns $CODE."""
    command = tmp_path / "host" / "srun"
    command.parent.mkdir()
    command.write_text(f"#!/bin/sh\necho '{LOST}' >&2\nexit $CODE\n")
    command.chmod(0o755)
    return {"VHPC_RUN_COMMANDS": "srun", "VHPC_RUN_COMMAND_PATH": str(command.parent)}


def mpirun(
    guest: Guest, srun: dict[str, str], code: int, *argv: str, name: str = "mpirun"
) -> tuple[int, str]:
    program = guest.folder / name
    program.symlink_to(Path("/usr/bin/python3").resolve())
    call = (f"{guest.bin}/vhpc-agent", "--call", "srun", *argv)
    done = guest.run(str(program), "-c", MPIRUN, *call, stdin=b"", CODE=str(code), **srun)
    return done.returncode, done.stderr.decode()


DAEMONS = ("--ntasks-per-node=1", "--kill-on-bad-exit", "--nodelist=n2", "--ntasks=1")


@pytest.mark.parametrize("code", [125, 137, 143])
@pytest.mark.parametrize("daemon", ["prted", "/opt/openmpi/bin/orted"])
def test_mpirun_ends_with_an_error_and_the_line_of_srun(
    guest: Guest, srun: dict[str, str], code: int, daemon: str
) -> None:
    status, said = mpirun(guest, srun, code, *DAEMONS, daemon, "--prtemca", "ess", "slurm")
    assert (status, said) == (1, f"{LOST}\nmpirun ends\n")


def test_daemons_that_end_by_themselves_do_not_end_mpirun(guest: Guest, srun: dict[str, str]) -> None:
    assert mpirun(guest, srun, 1, *DAEMONS, "prted")[0] == 0


def test_other_programs_are_left_alone(guest: Guest, srun: dict[str, str]) -> None:
    status, said = mpirun(guest, srun, 125, "-n1", "sh", "-c", "prted")
    assert (status, said) == (0, "mpirun ends\n")


def test_only_a_launcher_is_ended(guest: Guest, srun: dict[str, str]) -> None:
    """A script that stands for srun goes on, and mpirun gets what it returns."""
    status, said = mpirun(guest, srun, 125, *DAEMONS, "prted", name="srun.wrapper")
    assert (status, said) == (0, f"{LOST}\nmpirun ends\n")
