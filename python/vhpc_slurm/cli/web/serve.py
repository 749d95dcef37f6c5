# SPDX-License-Identifier: Apache-2.0
"""Run vhpc web until SIGINT or SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import re
import signal
import socket
from pathlib import Path
from typing import Any

from vhpc_slurm import record
from vhpc_slurm.cli.web import sockets
from vhpc_slurm.config import Config
from vhpc_slurm.errors import NodeError, UserError

try:
    import h11
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol

    from vhpc_slurm.cli.web import guard, pages
    from vhpc_slurm.cli.web.asking import Asker
except ImportError as missing:
    raise NodeError(
        "vhpc web needs the Python packages starlette and uvicorn",
        str(missing),
        "apt install python3-starlette python3-uvicorn, or pip install 'vhpc-slurm[web]'",
    ) from missing

CONNECTIONS = 256
"""At a time; a browser has at most six for each page that it loads."""
FIRST_REQUEST_S = 10.0
KEEP_ALIVE_S = 15
END_S = 3
MAX_HEAD = 16384
"""Bytes of a request's head."""
HEADER_NAME = re.compile(r"[A-Za-z][A-Za-z0-9-]{0,63}")


class BoundedProtocol(H11Protocol):
    """HTTP/1.1 with limits: connections, a request's head, and the wait for a connection's first request."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        # uvicorn of Debian 12 has no setting for it
        self.conn = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A connection has been accepted."""
        super().connection_made(transport)
        if len(self.connections) > CONNECTIONS:
            transport.abort()
            return
        asyncio.get_running_loop().call_later(FIRST_REQUEST_S, self._has_begun)

    def _has_begun(self) -> None:
        if self.cycle is None:
            self.transport.abort()


class BoundedServer(uvicorn.Server):
    """A server whose end has a limit, for which uvicorn of Debian 12 has no setting."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for answers that are being sent; what remains is cancelled when the event loop ends."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(super().shutdown(sockets), END_S)


def run_loopback(config: Config, port: int) -> int:
    """Serve this user on the loopback address; prints the address with its token."""
    listener = sockets.loopback(port)
    port = listener.getsockname()[1]
    access = guard.TokenAccess(port)
    print(f"http://127.0.0.1:{port}/?token={access.token}")
    print(f"from your own computer, first: ssh -L {port}:127.0.0.1:{port} {socket.gethostname()}")
    print("it shows what vhpc ps shows you; keep the address to yourself; Ctrl-C ends it", flush=True)
    return _serve(config, access, listener)


def run_proxied(config: Config, path: Path, header: str, hosts: list[str], group: str | None) -> int:
    """Serve the users of the site's proxy on a Unix socket.

    Raises:
        UserError: this user may not, or an option cannot be used.
    """
    if not HEADER_NAME.fullmatch(header):
        raise UserError(
            f"{header[:60]!r} is not the name of a header", "", "like --user-header X-Remote-User"
        )
    _check_user(config)
    listener = sockets.unix(path, group)
    try:
        return _serve(config, guard.ProxyAccess(header, frozenset(hosts)), listener)
    finally:
        path.unlink(missing_ok=True)


def _check_user(config: Config) -> None:
    """Others would get vhpcd's refusal for each page."""
    names = ["root", config.controller.slurm_user, config.controller.web_user]
    name = pwd.getpwuid(os.geteuid()).pw_name
    if name not in names:
        raise UserError(
            f"user {name} may not serve other users",
            f"vhpcd answers for other users only to {', '.join(one for one in names if one)}",
            "run the unit vhpc-web.service, see docs/web.md; without --socket the page is for yourself",
        )


def _serve(config: Config, access: guard.Access, listener: socket.socket) -> int:
    record.prepare()  # the asker's threads decode answers
    asker = Asker()
    settings: dict[str, Any] = {"log_level": "warning", "access_log": False, "server_header": False}
    server = BoundedServer(
        uvicorn.Config(
            pages.guarded(config, asker, access),
            http=BoundedProtocol,
            ws="none",
            lifespan="off",
            proxy_headers=False,
            limit_concurrency=CONNECTIONS,
            timeout_keep_alive=KEEP_ALIVE_S,
            **settings,
        )
    )

    def end(_number: int, _frame: object) -> None:
        server.should_exit = True

    # before uvicorn has its own handlers, and after its end, when it raises the signal again
    previous = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        server.run(sockets=[listener])
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        asker.close()
        listener.close()
    return 0
