# SPDX-License-Identifier: Apache-2.0
"""vhpc ssh and vhpc ssh-config: OpenSSH's client and a guest of a running job."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from vhpc_slurm import slurm
from vhpc_slurm.cli import context, options, output
from vhpc_slurm.cli.jobs import jobguest, sshkeys, sshserver
from vhpc_slurm.cli.jobs.jobguest import GuestOfNode, NodeOfJob
from vhpc_slurm.cli.jobs.sshkeys import Keys
from vhpc_slurm.cli.options import JobId, Json
from vhpc_slurm.errors import UserError

_LOGIN = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._@:-]{0,253}[A-Za-z0-9_])?")


def ssh(
    ctx: typer.Context,
    job_id: JobId,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ARG",
            help="Options of ssh, then a command; default a shell.",
            show_default=False,
        ),
    ] = None,
    node: NodeOfJob = None,
    guest: GuestOfNode = 0,
    stdio: Annotated[bool, typer.Option("--stdio", hidden=True)] = False,
) -> int:
    """Open an ssh session in a guest of your running job, or run a command there.

    The image needs sshd, the guest no network. For scp, rsync and editors see vhpc ssh-config.
    """
    words, node, guest = _own_options(words or [], node, guest)
    if words[:1] in (["-h"], ["--help"]):
        print(ctx.get_help())
        return 0
    place = jobguest.find(slurm.user_jobs(options.config()), job_id, node, guest)
    keys = sshkeys.of_user()
    if stdio:
        return sshserver.serve(place, keys)
    program = [sys.executable, *(["-I"] if sys.flags.isolated else []), "-m", "vhpc_slurm.cli.main"]
    found = _here(keys, [*program, *_proxy(job_id, node, guest)])
    arguments = [f"-o{name}={value}" for name, value in found.items()]
    try:
        os.execvp("ssh", ["ssh", *arguments, _host(job_id, node, guest), *words])  # noqa: S606 - as the user, who could type it
    except OSError as err:
        raise UserError("cannot start ssh", err.strerror or str(err), "install OpenSSH's client") from err


def ssh_config(
    job_id: JobId,
    node: NodeOfJob = None,
    guest: GuestOfNode = 0,
    login: Annotated[
        str | None,
        typer.Option(
            "--login",
            metavar="HOST",
            help="For your own computer: name of this login host for ssh there.",
            show_default=False,
        ),
    ] = None,
    json: Json = False,
) -> int:
    """Print lines for ~/.ssh/config with which ssh, scp, sftp, rsync and editors reach a guest of your job.

    With --login the lines are for your own computer, otherwise for this host.
    """
    if login is not None and not _LOGIN.fullmatch(login):
        raise UserError(
            f"{login[:80]!r} is not a host name", "", "give what follows ssh on your own computer"
        )
    jobguest.find(slurm.user_jobs(options.config()), job_id, node, guest)
    keys, host = sshkeys.of_user(), _host(job_id, node, guest)
    proxy = ["vhpc", *_proxy(job_id, node, guest)]
    found = _here(keys, proxy) if login is None else _there(keys, proxy, login)
    if json:
        output.write_json({"host": host, "options": found})
        return 0
    print(f"# Job {job_id} of {context.user_name()}, until it ends.")
    if login is not None:
        print(
            f"# The key of this computer must be in ~/.ssh/authorized_keys on {login}.\n"
            "# Without /bin/echo (Windows), put this line into ~/.ssh/known_hosts:\n"
            f"# {found['HostKeyAlias']} {keys.host_public()}"
        )
    print(f"Host {host}")
    for name, value in found.items():
        print(f"    {name} {value}")
    return 0


def _own_options(words: list[str], node: str | None, guest: int) -> tuple[list[str], str | None, int]:
    """Options of vhpc that follow JOBID; all from the first other word on is ssh's."""
    while words and (match := re.fullmatch(r"--(node|guest)(?:=(.*))?", words[0], re.DOTALL)):
        name, value, words = match[1], match[2], words[1:]
        if value is None:
            value, words = (words or [""])[0], words[1:]
        if not value or (name == "guest" and not re.fullmatch("[0-9]{1,4}", value, re.ASCII)):
            raise typer.BadParameter(f"--{name} needs a {'name' if name == 'node' else 'number'}")
        node, guest = (value, guest) if name == "node" else (node, int(value))
    return words, node, guest


def _host(job_id: int, node: str | None, guest: int) -> str:
    """Name of a guest for ssh; it is in no DNS."""
    return f"vhpc-{job_id}" + (f"-{node}" if node else "") + (f"-g{guest}" if guest else "")


def _proxy(job_id: int, node: str | None, guest: int) -> list[str]:
    own = [*(["--node", node] if node else []), *(["--guest", str(guest)] if guest else [])]
    return ["ssh", "--stdio", *own, str(job_id)]


def _common(alias: str) -> dict[str, str]:
    return {
        "User": context.user_name(),
        "HostKeyAlias": alias,
        "StrictHostKeyChecking": "yes",
        "UpdateHostKeys": "no",
        "CheckHostIP": "no",
        "CanonicalizeHostname": "no",
        "PreferredAuthentications": "publickey",
    }


def _here(keys: Keys, proxy: Sequence[str]) -> dict[str, str]:
    """Options of ssh on this host."""
    return {
        "ProxyCommand": shlex.join(proxy).replace("%", "%%"),
        **_common(sshkeys.NAME),
        "UserKnownHostsFile": _quoted(str(keys.known_hosts)),
        "GlobalKnownHostsFile": "/dev/null",
        "IdentityFile": _quoted(str(keys.identity)),
        "IdentitiesOnly": "yes",
    }


def _there(keys: Keys, proxy: Sequence[str], login: str) -> dict[str, str]:
    """Options of ssh on a computer from which this host is reached by ssh."""
    alias = f"{sshkeys.NAME}.{login.rpartition('@')[2]}"
    return {
        "ProxyCommand": f"ssh -o ClearAllForwardings=yes {login} {shlex.join(proxy)}",
        **_common(alias),
        "IgnoreUnknown": "KnownHostsCommand",
        "KnownHostsCommand": f"/bin/echo {alias} {keys.host_public()}",
    }


def _quoted(path: str) -> str:
    """A path as ssh's configuration takes it."""
    return '"' + path.replace("%", "%%") + '"'
