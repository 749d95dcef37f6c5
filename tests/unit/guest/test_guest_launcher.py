# SPDX-License-Identifier: Apache-2.0
"""MPI launchers that start their daemons by srun: daemons that are lost, and guests without a network."""

from __future__ import annotations

import os
import shlex
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pmi_rig import join_network

pytestmark = pytest.mark.promise("mpi.daemon-lost")

if TYPE_CHECKING:
    from guest_rig import Guest

pytest_plugins = ["guest_rig", "pmi_rig"]

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
needs_root = pytest.mark.skipif(
    os.getuid() != 0, reason="only root can make a network namespace: run as root"
)
LOST = "vhpc: the guest of job 5 on n2 is gone"


@pytest.fixture
def srun(tmp_path: Path) -> dict[str, str]:
    """The host's srun: prints a line and returns $CODE."""
    command = tmp_path / "host" / "srun"
    command.parent.mkdir()
    command.write_text(f"#!/bin/sh\necho '{LOST}' >&2\nexit $CODE\n")
    command.chmod(0o755)
    return {"VHPC_RUN_COMMANDS": "srun", "VHPC_RUN_COMMAND_PATH": str(command.parent)}


def named(guest: Guest, name: str) -> Path:
    """Python as a process of that name."""
    program = guest.folder / name
    program.symlink_to(Path("/usr/bin/python3").resolve())
    return program


def mpirun(
    guest: Guest, srun: dict[str, str], code: int, *argv: str, name: str = "mpirun"
) -> tuple[int, str]:
    join_network(guest)
    program = named(guest, name)
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


def test_other_programs_are_not_ended(guest: Guest, srun: dict[str, str]) -> None:
    status, said = mpirun(guest, srun, 125, "-n1", "sh", "-c", "prted")
    assert (status, said) == (0, "mpirun ends\n")


def test_only_a_launcher_is_ended(guest: Guest, srun: dict[str, str]) -> None:
    """A script in place of srun continues, and mpirun gets its exit status."""
    status, said = mpirun(guest, srun, 125, *DAEMONS, "prted", name="srun.wrapper")
    assert (status, said) == (0, f"{LOST}\nmpirun ends\n")


# As mpiexec of MPICH 4.2.1 (hydra, slurm_launch.c): it relays the stderr of srun from a pipe, and waits
# without end for proxies that do not connect to it. In argv: the command that it starts.
HYDRA = """
import subprocess, sys, time
PIPE = subprocess.PIPE
srun = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, stdout=PIPE, stderr=PIPE)
said = srun.communicate()[1].decode()
sys.stderr.write("relayed " + said if said else "")
time.sleep(0 if srun.returncode == 0 else 60)
"""
# As prterun of Open MPI 5.0.7 (prrte, plm_slurm_component.c): it asks for srun's version by popen(3); then it
# crashes at the name of another node if this one has no address, unless it has more words (of these tests).
PRTERUN = """
import os, signal, subprocess, sys
said = subprocess.run(sys.argv[1], shell=True, stdout=subprocess.PIPE).stdout
if len(sys.argv) == 2:
    os.kill(os.getpid(), signal.SIGSEGV)
print(said.decode(), end="")
"""
# As orterun of Open MPI 4.1 (plm_slurm_module.c): it discards what srun writes, and has a text of its own.
ORTERUN = """
import subprocess, sys
subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
sys.exit("An ORTE daemon has unexpectedly failed")
"""
REFUSED = (
    "vhpc: {name} starts an MPI program in several guests, but the guests of this job have no network "
    "between them: submit the job with --vhpc-network=job\n"
)
PROXY = ("--input", "none", "/usr/bin/hydra_pmi_proxy", "--control-port", "n1:33399")
TWO = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2", "CODE": "0"}


def launch(
    guest: Guest,
    srun: dict[str, str],
    name: str,
    program: str,
    *argv: str,
    alone: bool = False,
    **env: str,
) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a shell that runs a launcher in a job of two guests.

    ``alone``: this one has only a loopback interface.
    """
    call = [f"{guest.bin}/vhpc-agent", "--call", "srun"]
    command = [str(named(guest, name)), "-c", program]
    command += [" ".join([*call, *argv[:1]]), *argv[1:]] if program == PRTERUN else [*call, *argv]
    network = ("unshare", "--net") if alone else ()
    script = f"{shlex.join(command)}; exit $?"
    done = guest.run(*network, "sh", "-c", script, stdin=b"", **srun | TWO | env)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


@pytest.mark.promise("mpi.no-network")
@pytest.mark.parametrize("proxy", ["hydra_pmi_proxy", "/opt/intel/hydra_bstrap_proxy"])
@pytest.mark.parametrize("where", [("-N", "2"), ("-N2",), ("--nodelist", "n2", "-N", "1")])
def test_hydra_without_a_network_ends_with_one_line(
    guest: Guest, srun: dict[str, str], where: tuple[str, ...], proxy: str
) -> None:
    ended = launch(guest, srun, "mpiexec.hydra", HYDRA, *where, "-n", "2", proxy)
    assert ended == (126, "", REFUSED.format(name="mpiexec.hydra"))


@pytest.mark.promise("mpi.no-network")
@needs_root
def test_open_mpi_5_without_a_network_does_not_crash(guest: Guest, srun: dict[str, str]) -> None:
    ended = launch(guest, srun, "prterun", PRTERUN, "--version", alone=True)
    assert ended == (126, "", REFUSED.format(name="mpirun"))


@pytest.mark.promise("mpi.no-network")
@pytest.mark.parametrize("daemon", ["orted", "prted"])
def test_open_mpi_without_a_network_ends_with_one_line(
    guest: Guest, srun: dict[str, str], daemon: str
) -> None:
    ended = launch(guest, srun, "mpirun.openmpi", ORTERUN, "--nodelist=n2", "-n1", daemon)
    assert ended == (126, "", REFUSED.format(name="mpirun.openmpi"))


def test_the_line_stays_in_a_file_that_is_written_on(guest: Guest, srun: dict[str, str]) -> None:
    """The shell's position in the file comes after the line, although another process has written it."""
    file = guest.folder / "errors"
    program = named(guest, "mpiexec.hydra")
    call = shlex.join([str(program), "-c", HYDRA, f"{guest.bin}/vhpc-agent", "--call", "srun", "-N2", *PROXY])
    done = guest.run("sh", "-c", f"exec 2>{file}; {call}; echo after $? >&2", stdin=b"", **srun | TWO)
    assert done.returncode == 0
    assert file.read_text() == REFUSED.format(name="mpiexec.hydra") + "after 126\n"


def test_hydra_in_its_own_guest_is_not_refused(guest: Guest, srun: dict[str, str]) -> None:
    ended = launch(guest, srun, "mpiexec.hydra", HYDRA, "-N1", "-n1", *PROXY)
    assert ended == (0, "", f"relayed {LOST}\n")


def test_launchers_with_a_network_are_not_refused(guest: Guest, srun: dict[str, str]) -> None:
    join_network(guest)
    ended = launch(guest, srun, "mpiexec.hydra", HYDRA, "-N2", "-n2", *PROXY)
    assert ended == (0, "", f"relayed {LOST}\n")


@needs_root
@pytest.mark.parametrize(
    ("words", "env"),
    [
        (("--prtemca", "ras", "^slurm"), {}),
        (("ras by environment",), {"PRTE_MCA_ras": "^slurm"}),
        (("one guest",), {"SLURM_JOB_NODELIST": socket.gethostname().split(".")[0]}),
    ],
)
def test_open_mpi_5_that_would_not_crash_continues(
    guest: Guest, srun: dict[str, str], words: tuple[str, ...], env: dict[str, str]
) -> None:
    ended = launch(guest, srun, "prterun", PRTERUN, "--version", *words, alone=True, **env)
    assert ended == (0, "", f"{LOST}\n")


@needs_root
def test_open_mpi_5_in_a_guest_with_nat_continues(guest: Guest, srun: dict[str, str]) -> None:
    """It has an address, and does not crash; its daemons in other guests are refused later."""
    program = named(guest, "prterun")
    call = [str(program), "-c", PRTERUN, f"{guest.bin}/vhpc-agent --call srun --version", "with an address"]
    nat = "ip link set lo up; ip link add nat0 type bridge; ip address add 10.0.2.15/24 dev nat0"
    script = f"{nat}; {shlex.join(call)}"
    done = guest.run("unshare", "--net", "sh", "-c", script, stdin=b"", **srun | TWO)
    assert (done.returncode, done.stderr.decode()) == (0, f"{LOST}\n")


def test_srun_tells_its_version_to_other_programs(guest: Guest, srun: dict[str, str]) -> None:
    done = guest.run(f"{guest.bin}/vhpc-agent", "--call", "srun", "--version", stdin=b"", **srun | TWO)
    assert (done.returncode, done.stderr.decode()) == (0, f"{LOST}\n")
