# SPDX-License-Identifier: Apache-2.0
"""vhpc cluster login: a front end of a cluster, which is a small job that is a member of it."""
# Decision: The front end of a cluster is a job

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from vhpc_slurm import slurm
from vhpc_slurm.cli import context, leases, options
from vhpc_slurm.cli.jobs.clusters import Name, named
from vhpc_slurm.cli.jobs.shell import SHELL
from vhpc_slurm.errors import UserError
from vhpc_slurm.model import ImageRef

if TYPE_CHECKING:
    from vhpc_slurm.config import Config

LAUNCHERS = """
files=${VHPC_CLUSTER_HOSTFILE%/*}
export PDSH_RCMD_TYPE=ssh WCOLL=$files/hosts
export PRTE_MCA_plm=ssh PRTE_MCA_ras=^slurm PRTE_MCA_prte_default_hostfile=$VHPC_CLUSTER_HOSTFILE
export OMPI_MCA_orte_default_hostfile=$VHPC_CLUSTER_HOSTFILE
export HYDRA_LAUNCHER=ssh HYDRA_LAUNCHER_EXTRA_ARGS= HYDRA_IFACE=vhpc0
export HYDRA_HOST_FILE=$VHPC_CLUSTER_MACHINEFILE
"""
"""Lines of sh: mpirun of Open MPI and MPICH, and pdsh, start programs on all guests of the cluster by ssh.

Without an interface, MPICH gives its daemons this guest's own host name, which other jobs do not know.
"""


def login(
    name: Name,
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="COMMAND", help="Command to run; default: a shell.", show_default=False),
    ] = None,
    image: Annotated[
        str | None,
        typer.Option(
            "--image", metavar="IMAGE", help="Image of the guest; default: login.image.", show_default=False
        ),
    ] = None,
    partition: Annotated[
        str | None,
        typer.Option("--partition", metavar="NAME", help="Default: login.partition.", show_default=False),
    ] = None,
    srun: Annotated[
        list[str] | None,
        typer.Option(
            "--srun",
            metavar="OPTION",
            help="Option of srun, like --account=physics or --mem=4G; may be repeated.",
            show_default=False,
        ),
    ] = None,
) -> NoReturn:
    """Open a shell, or run a command, in a new guest of a cluster.

    The guest is a job with one CPU, and ends with the shell. From there mpirun, ssh and pdsh reach all guests
    of the cluster. Options of the command follow --, as in: vhpc cluster login NAME -- hostname -f
    """
    config, words = options.config(), command or []
    if context.is_root():
        raise UserError("root has no jobs in guests", "", "run the command as the user of the cluster")
    cluster, terminal = _existing(config, name), os.isatty(0) and os.isatty(1)
    if not (words or terminal):
        raise UserError(
            "a shell needs a terminal", "", f"give a command: vhpc cluster login {name} -- COMMAND"
        )
    account = cluster.rpartition("/")[0]
    arguments = [
        *(["--pty"] if terminal else []),
        f"--job-name=login-{cluster.rpartition('/')[2]}",
        *([f"--account={account}"] if account else []),
        f"--partition={_partition(config, partition)}",
        *("--nodes=1", "--ntasks=1", "--cpus-per-task=1", f"--mem={config.login.memory_mib}"),
        # the shell is no MPI program, and leaves its CPU to steps that it starts
        *("--mpi=none", "--overlap"),
        f"--vhpc-image={_image(config, image)}",
        f"--vhpc-cluster={cluster}",
        *(srun or []),
    ]
    script = LAUNCHERS + ('exec "$@"' if words else SHELL)
    slurm.user_jobs(config).become_srun([*arguments, "/bin/sh", "-c", script, "vhpc-login", *words])


def _image(config: Config, given: str | None) -> str:
    image = config.login.image if given is None else given
    if not image:
        raise UserError(
            "this site has no image for logins", "login.image of vhpc.toml is empty", "use --image IMAGE"
        )
    return str(ImageRef.parse(image))


def _partition(config: Config, given: str | None) -> str:
    """The partition of the job; UserError if no job can start there."""
    partition = config.login.partition if given is None else given
    if not partition:
        raise UserError(
            "this site has no partition for logins",
            "login.partition of vhpc.toml is empty",
            "use --partition NAME; see: sinfo -s",
        )
    state = slurm.user_jobs(config).partition_state(partition)
    if state == "UP":
        return partition
    source = "" if given is not None else "login.partition of vhpc.toml names it"
    what = f"partition {partition[:80]} is {state}" if state else f"there is no partition {partition[:80]!r}"
    raise UserError(what, source, "use another: --partition NAME; see: sinfo -s")


def _existing(config: Config, name: str) -> str:
    """The name of a cluster that exists: a new one would have no other guests."""
    known = leases.client(config).clusters()
    try:
        # ACCOUNT/NAME is a cluster of an account; operators are also told of those of other users
        return named(known, name, None if "/" in name else context.user_name()).name
    except UserError as err:
        raise UserError(
            err.what,
            "a login joins a cluster that exists",
            f"see: vhpc cluster ls --all, or make it: vhpc cluster create {name[:80]}",
        ) from err
