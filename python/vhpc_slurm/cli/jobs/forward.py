# SPDX-License-Identifier: Apache-2.0
"""vhpc forward: a TCP port of a guest, on this host, through a step of the job."""
# Decision: Ports and files go through a step

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import re
import socket
import stat
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from vhpc_slurm import slurm
from vhpc_slurm.cli import options
from vhpc_slurm.cli.jobs import jobguest
from vhpc_slurm.cli.jobs.forwarding import Forwarding
from vhpc_slurm.cli.jobs.jobguest import GuestOfNode, JobGuest, NodeOfJob
from vhpc_slurm.cli.jobs.steprelay import AGENT, Serve, ended, relay, say, too_old
from vhpc_slurm.cli.options import JobId
from vhpc_slurm.errors import UserError

LOOPBACK = "127.0.0.1"
BACKLOG = 64


@dataclass(frozen=True)
class Ports:
    """``[LOCAL:]PORT``; local 0 is any free port."""

    local: int
    guest: int

    @classmethod
    def parse(cls, text: str) -> Ports:
        """UserError if the text is not ``[LOCAL:]PORT``."""
        match = re.fullmatch(r"(?:([0-9]{1,5}):)?([0-9]{1,5})", text, re.ASCII)
        guest = int(match[2]) if match else 0
        local = int(match[1]) if match and match[1] is not None else guest
        if not 0 < guest < 65536 or local > 65535:
            raise UserError(
                f"{text[:40]!r} is not [LOCAL:]PORT",
                "ports are numbers from 1 to 65535; LOCAL may be 0, for any free port",
            )
        return cls(local, guest)


@dataclass(frozen=True)
class Door:
    """Where clients connect, and which of them may.

    Attributes:
        path: of a unix socket that only the user can open, in place of a port.
        address: IP address of this host that the port is on.
        clients: IP addresses of hosts that may connect; empty: all that can.
    """

    path: Path | None = None
    address: str = LOOPBACK
    clients: tuple[str, ...] = ()

    @classmethod
    def parse(cls, path: Path | None, address: str | None, clients: Sequence[str]) -> Door:
        """UserError if the options exclude each other, or have no addresses."""
        if path is not None and (address is not None or clients):
            raise UserError("--socket is not for other hosts", "", "give --listen and --from without it")
        try:
            found = [str(ipaddress.ip_address(text)) for text in (address or LOOPBACK, *clients)]
        except ValueError as err:
            raise UserError("--listen and --from have IP addresses", str(err)) from err
        return cls(path, found[0], tuple(found[1:]))

    def admits(self, peer: str) -> bool:
        """Whether a client with this address may connect."""
        return not self.clients or peer in self.clients

    def note(self) -> str:
        """The text for the user about who can connect."""
        if self.clients:
            return f"; only {', '.join(self.clients)} can connect to it"
        if ipaddress.ip_address(self.address).is_loopback:
            return "; other users of this host can connect to it too, to a --socket they cannot"
        return "; all hosts that reach this address can connect to it"


def forward(
    job_id: JobId,
    ports: Annotated[
        str,
        typer.Argument(metavar="[LOCAL:]PORT", help="Port here, and port of the guest.", show_default=False),
    ],
    node: NodeOfJob = None,
    guest: GuestOfNode = 0,
    path: Annotated[
        Path | None,
        typer.Option(
            "--socket", metavar="PATH", help="A unix socket that only you can open, in place of a port here."
        ),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option("--listen", metavar="ADDRESS", help="An address of this host in place of 127.0.0.1."),
    ] = None,
    clients: Annotated[
        list[str] | None,
        typer.Option(
            "--from",
            metavar="ADDRESS",
            help="Only this host may connect; may be repeated.",
            show_default=False,
        ),
    ] = None,
) -> int:
    """Connect a port of this host to a TCP port of a guest of your running job, until Ctrl-C.

    Programs of all users of this host can connect to a port, but not to a --socket; with --listen
    also programs of other hosts.
    """
    door = Door.parse(path, address, clients or ())
    config, wanted = options.config(), Ports.parse(ports)
    if door.path is not None and ":" in ports:
        raise UserError("--socket and a local port exclude each other", "", f"give {wanted.guest} alone")
    with _listening(wanted.local, door) as listener:
        place = jobguest.find(slurm.user_jobs(config), job_id, node, guest)
        step = place.start("vhpc-forward", [AGENT, "--forward", str(wanted.guest), "--task", str(place.task)])
        try:
            asyncio.run(relay(step, place, _connections(listener, place, wanted.guest, door)))
            return ended(step, place, lambda lines: too_old(lines, "forward ports"))
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None  # SIGTERM and SIGHUP end it as Ctrl-C does
        finally:
            step.end()


@contextlib.contextmanager
def _listening(port: int, door: Door) -> Iterator[socket.socket]:
    """A socket that clients connect to."""
    path = door.path
    with contextlib.ExitStack() as stack:
        if path is None:
            family = socket.AF_INET6 if ":" in door.address else socket.AF_INET
            sock = stack.enter_context(socket.socket(family))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            host = "this host" if door.address == LOOPBACK else door.address
            where, name = f"port {port} of {host}", (door.address, port)
        else:
            sock = stack.enter_context(socket.socket(socket.AF_UNIX))
            where, name = str(path), str(path)  # type: ignore[assignment]
        mask = os.umask(0o177)
        try:
            sock.bind(name)
        except (OSError, ValueError) as err:
            why = err.strerror if isinstance(err, OSError) and err.strerror else str(err)
            hint = (
                "choose another: LOCAL:PORT; LOCAL 0 is any free port" if path is None else "remove it first"
            )
            raise UserError(f"cannot listen on {where}", why, hint) from err
        finally:
            os.umask(mask)
        if path is not None:
            stack.callback(_remove, path, path.stat(follow_symlinks=False).st_ino)
        sock.listen(BACKLOG)
        sock.setblocking(False)
        yield sock


def _remove(path: Path, inode: int) -> None:
    """Remove our socket, and not another one that has its name."""
    with contextlib.suppress(OSError):
        found = path.stat(follow_symlinks=False)
        if stat.S_ISSOCK(found.st_mode) and found.st_ino == inode:
            path.unlink()


def _connections(listener: socket.socket, place: JobGuest, port: int, door: Door) -> Serve:
    """A function that relays connections to the listener until it is cancelled."""

    async def serve(forwarding: Forwarding, listens: bool) -> None:
        if listener.family == socket.AF_UNIX:
            server = await asyncio.start_unix_server(forwarding.serve, sock=listener)
        else:
            server = await asyncio.start_server(_guarded(forwarding, door), sock=listener)
        try:
            _greet(listener, place, port, door, listens=listens)
            await asyncio.Event().wait()
        finally:
            server.close()

    return serve


def _guarded(
    forwarding: Forwarding, door: Door
) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
    """A function that serves a client if it may connect, and resets connections of others."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = writer.get_extra_info("peername")
        if peer is None or not door.admits(peer[0]):
            writer.transport.abort()
            return
        await forwarding.serve(reader, writer)

    return serve


def _greet(listener: socket.socket, place: JobGuest, port: int, door: Door, *, listens: bool) -> None:
    if listener.family == socket.AF_UNIX:
        here, note = listener.getsockname(), ""
    else:
        address, local = listener.getsockname()[:2]
        here, note = f"[{address}]:{local}" if ":" in address else f"{address}:{local}", door.note()
    say(f"{here} leads to port {port} of {place}, until Ctrl-C{note}")
    if not listens:
        say(f"nothing listens on port {port} of {place} yet; connections are refused until something does")
