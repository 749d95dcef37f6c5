# SPDX-License-Identifier: Apache-2.0
"""vhpc-hookd: has the modules of slurmctld's hooks in memory, and forks for each hook.

Python's start and imports cost ten times as much as what PrologSlurmctld and EpilogSlurmctld do.
The programs of these names (``hookd/``) ask this process over a socket, and run a Python of their
own without it.  The child serves its client alone, from reading the request (``hookd/ask.c``) to
sending the exit status, so that nothing is lost when this process ends.

A hook that runs here is the same as in a process of its own: environment, stdout and stderr are
those of its client, and it ends with its client, which slurmctld may kill.
"""

from __future__ import annotations

import _thread
import contextlib
import gc
import logging
import os
import signal
import socket
import struct
import sys
from pathlib import Path

from vhpc_slurm.config import DEFAULT_PATH, Config, load
from vhpc_slurm.controller import exchange
from vhpc_slurm.errors import VhpcError
from vhpc_slurm.hooks import slurmctld, start

SOCKET = Path("/run/vhpc-hookd/socket")
"""In a folder that only SlurmUser may enter; hookd/CMakeLists.txt names it as well."""
REQUEST_S = 10.0
"""How long a client may take to send its request."""
MAX_REQUEST = 8 << 20
"""Longest request in bytes: environment and word."""
BACKLOG = 4096
"""Clients that may wait; more run without this process."""
_LENGTH = struct.Struct("=I")
_PEER = struct.Struct("=iII")


def entry() -> int:
    """Process entry point: serve until the package is replaced."""
    installed = start.version()
    with _listen(SOCKET) as listener:
        _prepare()
        configuration = _Configuration()
        while True:
            link, _ = listener.accept()
            with link:
                # The client runs its hook with the new files, and systemd starts this process again.
                if start.mixed(installed):
                    return 0
                if _uid(link) in (0, os.geteuid()):
                    _fork(listener, link, configuration.current())


class _Configuration:
    """vhpc.toml, read again when it has changed."""

    def __init__(self) -> None:
        self._seen: tuple[int, ...] = ()
        self._config: Config | None = None

    def current(self) -> Config | None:
        """The configuration; None when it cannot be read, which the hook then reports."""
        try:
            found = DEFAULT_PATH.stat()
        except OSError:
            return None
        seen = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
        if seen != self._seen:
            self._seen, self._config = seen, None
            with contextlib.suppress(VhpcError):
                self._config = load(DEFAULT_PATH)
        return self._config


def _listen(path: Path) -> socket.socket:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen(BACKLOG)
    return listener


def _prepare() -> None:
    """Do once what each hook would do again, and let the kernel reap the children."""
    exchange.preload()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    gc.disable()  # a collection in a child would copy all pages


def _uid(link: socket.socket) -> int:
    """The uid of the process at the other end."""
    _, uid, _ = _PEER.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return int(uid)


def _fork(listener: socket.socket, link: socket.socket, config: Config | None) -> None:
    """Serve one client in a child; without memory for it, the client runs its hook itself."""
    with contextlib.suppress(OSError):
        if os.fork() == 0:
            try:
                listener.close()
                _serve(link, config)
            finally:
                os._exit(1)


def _serve(link: socket.socket, config: Config | None) -> None:
    """Run the hook that the client asks for; the process ends with it."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setpgid(0, 0)
    link.settimeout(REQUEST_S)
    try:
        word, environment = _request(link)
        if word not in slurmctld.HOOKS:
            return
        link.sendall(b"R")
        streams = _streams(link)
    except (OSError, EOFError):
        return
    for number, stream in zip((1, 2), streams, strict=True):
        os.dup2(stream, number)
        os.close(stream)
    os.environb.clear()
    os.environb.update(environment)
    link.settimeout(None)
    _thread.start_new_thread(_end_with, (link,))  # costs a fifth of a threading.Thread
    status = slurmctld.entry(word, None if "VHPC_CONFIG" in os.environ else config)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    with contextlib.suppress(OSError):
        link.sendall(bytes([status]))
    os._exit(0)


def _request(link: socket.socket) -> tuple[str, dict[bytes, bytes]]:
    """The hook's word, and its environment.

    Raises:
        OSError, EOFError: the client has gone, or is not ours.
    """
    (length,) = _LENGTH.unpack(_receive(link, _LENGTH.size))
    if length > MAX_REQUEST:
        raise EOFError
    word, *texts = _receive(link, length).split(b"\0")
    pairs = (text.partition(b"=") for text in texts)
    return os.fsdecode(word), {name: value for name, equals, value in pairs if name and equals}


def _receive(link: socket.socket, length: int) -> bytes:
    parts = []
    while length:
        part = link.recv(min(length, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


def _streams(link: socket.socket) -> list[int]:
    """Descriptors for stdout and stderr: with them the client confirms that it still waits."""
    start, streams, _, _ = socket.recv_fds(link, 1, 2)
    if start != b"S" or len(streams) != 2:
        raise EOFError
    return streams


def _end_with(link: socket.socket) -> None:
    """End this hook and its commands when the client does."""
    with contextlib.suppress(OSError):
        link.recv(1)
    os.killpg(0, signal.SIGKILL)
