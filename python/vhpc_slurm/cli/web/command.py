# SPDX-License-Identifier: Apache-2.0
"""vhpc web; the packages that serve need not be installed for its help."""
# Decision: A web server asks as a user, and has no other right

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vhpc_slurm.cli import options


def web(
    port: Annotated[
        int | None,
        typer.Option(
            "--port", metavar="N", min=0, max=65535, help="TCP port on 127.0.0.1; default a free one."
        ),
    ] = None,
    socket: Annotated[
        Path | None,
        typer.Option(
            "--socket", metavar="PATH", help="Serve all users by the site's proxy, on a Unix socket."
        ),
    ] = None,
    user_header: Annotated[
        str | None,
        typer.Option(
            "--user-header", metavar="NAME", help="With --socket: header in which the proxy names the user."
        ),
    ] = None,
    host: Annotated[
        list[str] | None,
        typer.Option(
            "--host", metavar="NAME", help="With --socket: host name of the page in browsers; repeatable."
        ),
    ] = None,
    socket_group: Annotated[
        str | None,
        typer.Option("--socket-group", metavar="GROUP", help="With --socket: group that may connect."),
    ] = None,
) -> int:
    """Show jobs, nodes, devices and keys in a browser; the page updates itself and changes nothing.

    It shows what `vhpc ps` and `vhpc report` show you. Print an address with a secret token, and serve
    it until Ctrl-C.
    """
    if socket is None and (user_header is not None or host or socket_group is not None):
        raise typer.BadParameter("--user-header, --host and --socket-group belong to --socket")
    if socket is not None and (port is not None or user_header is None or not host):
        raise typer.BadParameter("--socket needs --user-header and --host, and excludes --port")
    from vhpc_slurm.cli.web import serve

    config = options.config()
    if socket is None:
        return serve.run_loopback(config, port or 0)
    return serve.run_proxied(config, socket, user_header or "", host or [], socket_group)
