# SPDX-License-Identifier: Apache-2.0
"""vhpc cluster login: what it asks srun for, and mistakes that it finds before there is a job."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from vhpc_slurm.cli import context, leases, options
from vhpc_slurm.cli.main import COMMAND, main
from vhpc_slurm.config import Config
from vhpc_slurm.config.controller import Controller
from vhpc_slurm.config.login import Login
from vhpc_slurm.model import Cluster
from vhpc_slurm.node.resource import job_network

DASK = Cluster(7, "dask", os.geteuid(), 1_700_000_000.0, jobs=2, guests=5)
# Output of scontrol in Slurm 24.11.
SCONTROL = """#!/bin/sh
[ "$1 $2 $3 $4" = "--all -o show partition" ] || exit 9
case $5 in
login) echo "PartitionName=login AllowGroups=ALL Default=NO MaxNodes=1 State=UP TotalCPUs=8" ;;
down) echo "PartitionName=down AllowGroups=ALL State=DOWN TotalCPUs=8" ;;
dead) echo "slurm_load_partitions error: Unable to contact slurm controller" >&2; exit 1 ;;
*) echo "Partition $5 not found" >&2; exit 1 ;;
esac
"""


class ReplacedError(Exception):
    """Stands for the program that replaces this process; has its arguments."""


class Vhpcd:
    """A vhpcd that tells an operator of clusters of others, too."""

    def clusters(self) -> tuple[Cluster, ...]:
        others = Cluster(8, "dask", 1, 1_700_000_000.0), Cluster(9, "physics/ray", 1, 1_700_000_000.0)
        return (*others, DASK)


Site = Callable[[Login], None]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """A function that gives the site its table [login]; the user is not root and has a terminal."""
    (tmp_path / "scontrol").write_text(SCONTROL)
    (tmp_path / "scontrol").chmod(0o755)

    def replace(file: Path, argv: list[str], environment: dict[str, str]) -> None:
        assert file == tmp_path / "srun"
        assert not {"VHPC_IMAGE", "SLURM_JOB_ID"} & environment.keys()
        raise ReplacedError(argv)

    def settle(login: Login) -> None:
        config = Config(controller=Controller(slurm_bin=str(tmp_path)), login=login)
        monkeypatch.setattr(options, "config", lambda: config)

    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("VHPC_IMAGE", "other")
    monkeypatch.setattr("os.execve", replace)
    monkeypatch.setattr(context, "is_root", lambda: False)
    monkeypatch.setattr(leases, "client", lambda _: Vhpcd())
    monkeypatch.setattr(os, "isatty", lambda _: True)
    return settle


def asked(*words: str) -> list[str]:
    with pytest.raises(ReplacedError) as caught:
        COMMAND.main(args=["cluster", "login", *words], standalone_mode=False)
    argv: list[str] = caught.value.args[0]
    return argv


def test_a_shell_is_a_job_of_one_cpu_in_the_cluster(site: Site) -> None:
    site(Login(partition="login", image="debian-hpc", memory_mib=1500))
    *argv, shell, option, script, zero = asked("dask")
    assert argv == [
        "srun",
        "--pty",
        "--job-name=login-dask",
        "--partition=login",
        "--nodes=1",
        "--ntasks=1",
        "--cpus-per-task=1",
        "--mem=1500",
        "--mpi=none",
        "--overlap",
        "--vhpc-image=debian-hpc:latest",
        "--vhpc-cluster=dask",
    ]
    assert (shell, option, zero) == ("/bin/sh", "-c", "vhpc-login")
    assert "exec bash -i" in script


def test_a_command_needs_no_terminal(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site(Login(partition="none", image="none"))
    monkeypatch.setattr(os, "isatty", lambda _: False)
    own = ("--image", "own/mine:v2", "--partition", "login", "--srun=--mem=4G", "--srun", "-t10")
    argv = asked("dask", *own, "--", "mpirun", "-n", "4", "--image")
    assert "--pty" not in argv
    assert {"--partition=login", "--vhpc-image=own/mine:v2"} < set(argv)
    assert argv[argv.index("--vhpc-cluster=dask") + 1 :][:4] == ["--mem=4G", "-t10", "/bin/sh", "-c"]
    assert argv[-5:] == ["vhpc-login", "mpirun", "-n", "4", "--image"]


def test_a_cluster_of_an_account_needs_a_job_of_it(site: Site) -> None:
    site(Login(partition="login", image="debian-hpc"))
    argv = asked("physics/ray")
    assert {"--account=physics", "--vhpc-cluster=physics/ray", "--job-name=login-ray"} < set(argv)


def test_programs_that_use_ssh_find_the_files(site: Site) -> None:
    site(Login(partition="login", image="debian-hpc"))
    script = asked("dask", "--", "env")[-3]
    folder = "/run/vhpc/cluster"
    environment = {
        "PATH": os.environ["PATH"],
        "VHPC_CLUSTER_HOSTFILE": f"{folder}/hostfile",
        "VHPC_CLUSTER_MACHINEFILE": f"{folder}/machinefile",
        "HYDRA_LAUNCHER_EXTRA_ARGS": "--external-launcher",
    }
    words = ["/bin/sh", "-c", script, "vhpc-login", "env"]
    said = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    found = dict(line.split("=", 1) for line in said.stdout.splitlines())
    # pdsh(1), prte_info(1), mpiexec(1) of MPICH
    assert (found["PDSH_RCMD_TYPE"], found["WCOLL"]) == ("ssh", f"{folder}/hosts")
    assert found["PRTE_MCA_prte_default_hostfile"] == f"{folder}/hostfile"
    assert (found["PRTE_MCA_plm"], found["PRTE_MCA_ras"]) == ("ssh", "^slurm")
    assert found["HYDRA_HOST_FILE"] == f"{folder}/machinefile"
    assert found["HYDRA_IFACE"] == job_network.NAME
    assert (found["HYDRA_LAUNCHER"], found["HYDRA_LAUNCHER_EXTRA_ARGS"]) == ("ssh", "")


@pytest.mark.parametrize(
    ("login", "words", "code", "said"),
    [
        (
            Login(),
            ("dask",),
            1,
            "this site has no partition for logins: login.partition of vhpc.toml is empty",
        ),
        (Login(partition="login"), ("dask",), 1, "this site has no image for logins: login.image"),
        (Login(partition="old", image="a"), ("dask",), 1, "there is no partition 'old': login.partition of"),
        (Login(), ("dask", "--partition=x"), 1, "there is no partition 'x' (use another: --partition NAME;"),
        (Login(), ("dask", "--partition=down"), 1, "partition down is DOWN (use another"),
        (Login(), ("dask", "--partition=dead"), 4, "scontrol failed: slurm_load_partitions error: Unable"),
        (Login(), ("dsak",), 1, "there is no cluster 'dsak': a login joins a cluster that exists (see: vhpc"),
        (Login(partition="login"), ("dask", "--image=A b"), 1, "--vhpc-image='A b' is not an image name"),
    ],
)
def test_mistakes_are_found_before_there_is_a_job(
    site: Site, capsys: pytest.CaptureFixture[str], login: Login, words: tuple[str, ...], code: int, said: str
) -> None:
    site(login)
    assert main(["cluster", "login", *words]) == code
    line = capsys.readouterr().err
    assert line.startswith(f"vhpc: {said}")
    assert line.count("\n") == 1


def test_root_and_a_pipe_get_no_shell(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    site(Login(partition="login", image="debian-hpc"))
    monkeypatch.setattr(os, "isatty", lambda number: number == 1)
    assert main(["cluster", "login", "dask"]) == 1
    assert "a shell needs a terminal (give a command: vhpc cluster login dask -- COMMAND)" in (
        capsys.readouterr().err
    )
    monkeypatch.setattr(context, "is_root", lambda: True)
    assert main(["cluster", "login", "dask"]) == 1
    assert "root has no jobs in guests" in capsys.readouterr().err
