# SPDX-License-Identifier: Apache-2.0
"""Runs hooks for programs that ask over a socket (``hookd/ask.c`` has the protocol).

A hook that runs here is the same as in a process of its own: environment, stdout and stderr are
those of its client, and it ends with its client, which Slurm may kill.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from vhpc_slurm.config import DEFAULT_PATH, Config, load
from vhpc_slurm.errors import VhpcError
from vhpc_slurm.hooks import common

REQUEST_S = 10.0
"""How long a client may take to send its request."""
MAX_REQUEST = 8 << 20
"""Longest request in bytes: environment and word."""
Hook = Callable[[Config | None], int]
"""A hook: gets the configuration, or None if it is to be read; returns the exit status."""
_LENGTH = struct.Struct("=I")
_PEER = struct.Struct("=iII")


class Configuration:
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


def listen(path: Path, backlog: int) -> socket.socket:
    """A socket at ``path``, in a folder that only this process's user may enter."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen(backlog)
    return listener


def peer(link: socket.socket) -> tuple[int, int]:
    """Pid and uid of the process at the other end; the pid is 0 if this process cannot see it."""
    pid, uid, _ = _PEER.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return pid, uid


def is_allowed(uid: int) -> bool:
    """Whether a client with this uid is served: root, and the user of this process."""
    return uid in (0, os.geteuid())


def serve(link: socket.socket, hooks: Mapping[str, Hook], configuration: Configuration) -> int | None:
    """Run the hook that the client asks for; its exit status, or None if the client has asked for none.

    The environment and the streams of this process are the hook's afterwards. The process ends if the
    client goes before the hook's end.
    """
    link.settimeout(REQUEST_S)
    try:
        word, environment = _request(link)
        if word not in hooks:
            return None
        link.sendall(b"R")
        streams = _streams(link)
    except (OSError, EOFError):
        return None
    for number, stream in zip((1, 2), streams, strict=True):
        os.dup2(stream, number)
        os.close(stream)
    os.environb.clear()
    os.environb.update(environment)
    time.tzset()
    link.settimeout(None)
    watch = _Watch(link)
    status = hooks[word](None if "VHPC_CONFIG" in os.environ else configuration.current())
    common.close_log()
    sys.stdout.flush()
    sys.stderr.flush()
    watch.end()
    return status


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
    """Descriptors for stdout and stderr: with them the client confirms that it waits, and the hook begins."""
    start, streams, _, _ = socket.recv_fds(link, 1, 2)
    if start != b"S" or len(streams) != 2:
        raise EOFError
    link.sendall(b"B")
    return streams


class _Watch:
    """Ends this process and its commands when its client goes."""

    def __init__(self, link: socket.socket) -> None:
        self._link, self._over = link, False
        self._ended = _thread.allocate_lock()
        self._ended.acquire()
        _thread.start_new_thread(self._wait, ())  # costs a fifth of a threading.Thread

    def _wait(self) -> None:
        with contextlib.suppress(OSError):
            self._link.recv(1)
        if not self._over:
            os.killpg(0, signal.SIGKILL)
        self._ended.release()

    def end(self) -> None:
        """The hook has ended: the client may go."""
        self._over = True
        with contextlib.suppress(OSError):
            self._link.shutdown(socket.SHUT_RD)  # ends recv in the thread
        self._ended.acquire()
