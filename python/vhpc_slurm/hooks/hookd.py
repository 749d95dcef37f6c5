# SPDX-License-Identifier: Apache-2.0
"""vhpc-hookd: has the modules of slurmctld's hooks in memory, in children that run the hooks.

Python's start and imports cost ten times as much as what PrologSlurmctld and EpilogSlurmctld do.
The programs of these names (``hookd/``) ask this process over a socket, and run a Python of their
own without it.  A child serves its client alone, from reading the request (``hookd/ask.c``) to
sending the exit status, so that nothing is lost when this process ends.  Then it waits for another
client: a fork, with the pages that the child copies, costs as much as half of a hook.  A child has
one client at a time, so as many children as there are hooks run at once.

A hook that runs here is the same as in a process of its own: environment, stdout and stderr are
those of its client, and it ends with its client, which slurmctld may kill.
"""
# Decision: A process of slurmctld's host forks for its hooks

from __future__ import annotations

import _thread
import contextlib
import gc
import os
import select
import signal
import socket
import struct
import sys
from pathlib import Path

from vhpc_slurm.config import DEFAULT_PATH, Config, load
from vhpc_slurm.controller import exchange
from vhpc_slurm.errors import VhpcError
from vhpc_slurm.hooks import common, slurmctld, start

SOCKET = Path("/run/vhpc-hookd/socket")
"""In a folder that only SlurmUser may enter; hookd/CMakeLists.txt names it as well."""
REQUEST_S = 10.0
"""How long a client may take to send its request."""
MAX_REQUEST = 8 << 20
"""Longest request in bytes: environment and word."""
IDLE = 4
"""How many children wait for another hook at most; each has 4 MiB of its own."""
HOOKS = 100
"""How many hooks a child runs at most: it never collects garbage."""
KNOWN = 200
"""From so many children on, further ones run one hook: each of the others takes a descriptor here."""
BACKLOG = 4096
"""Clients that may wait; more run without this process."""
_LENGTH = struct.Struct("=I")
_PEER = struct.Struct("=iII")


def entry() -> int:
    """Process entry point: serve until the package is replaced."""
    installed = start.version()
    with _listen(SOCKET) as listener:
        _prepare()
        children = _Children(listener)
        while True:
            with children.accept() as link:
                # The client runs its hook with the new files, and systemd starts this process again.
                if start.mixed(installed):
                    return 0
                if _uid(link) in (0, os.geteuid()):
                    children.give(link)


class _Children:
    """The children, and those of them that wait for a hook."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._configuration = _Configuration()
        self._all: dict[int, socket.socket] = {}
        self._idle: list[socket.socket] = []
        self._poll = select.poll()
        self._poll.register(listener, select.POLLIN)

    def accept(self) -> socket.socket:
        """The next client."""
        while True:
            ready = [fd for fd, _ in self._poll.poll()]
            # first the children: one that has ended its hook takes the next client
            for fd in ready:
                if fd in self._all:
                    self._hear(self._all[fd])
            if self._listener.fileno() in ready:
                return self._listener.accept()[0]

    def give(self, link: socket.socket) -> None:
        """Have a child serve this client; without memory for one, the client runs its hook itself."""
        while self._idle:
            child = self._idle.pop()
            try:
                socket.send_fds(child, [b"c"], [link.fileno()])
            except OSError:  # it has ended
                self._drop(child)
            else:
                return
        with contextlib.suppress(OSError):
            self._fork(link)

    def _hear(self, child: socket.socket) -> None:
        """A child has ended its hook, or itself."""
        try:
            waits = child.recv(1) != b""
        except OSError:
            waits = False
        if waits and len(self._idle) < IDLE:
            self._idle.append(child)
        else:
            self._drop(child)

    def _drop(self, child: socket.socket) -> None:
        """Close a child's socket; the child ends when it has no client."""
        if child in self._idle:
            self._idle.remove(child)
        self._poll.unregister(child)
        del self._all[child.fileno()]
        child.close()

    def _fork(self, link: socket.socket) -> None:
        self._configuration.current()  # so that children need not read it
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        most = HOOKS if len(self._all) < KNOWN else 1
        with theirs:
            try:
                child = os.fork()
            except OSError:
                ours.close()
                raise
            if child == 0:
                try:
                    for other in (self._listener, ours, *self._all.values()):
                        other.close()
                    _work(theirs, link, self._configuration, most)
                finally:
                    os._exit(1)
        if most == 1:
            ours.close()
            return
        self._all[ours.fileno()] = ours
        self._poll.register(ours, select.POLLIN)


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


def _work(parent: socket.socket, link: socket.socket, configuration: _Configuration, most: int) -> None:
    """Serve at most so many clients one after another, first ``link``; the process ends with it."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setpgid(0, 0)
    nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    for left in reversed(range(most)):
        with link:
            status = _serve(link, configuration)
            # slurmctld waits until no process has the hook's stdout
            os.dup2(nowhere, 1)
            os.dup2(nowhere, 2)
            if left:
                with contextlib.suppress(OSError):
                    parent.send(b"w")  # first, so that the next client finds it waiting
            if status is not None:
                with contextlib.suppress(OSError):
                    link.sendall(bytes([status]))
        found = _given(parent) if left else None
        if found is None:
            break
        link = found
    os._exit(0)


def _given(parent: socket.socket) -> socket.socket | None:
    """The next client; None when vhpc-hookd wants no more of this child, or has ended."""
    try:
        _, found, _, _ = socket.recv_fds(parent, 1, 1, socket.MSG_CMSG_CLOEXEC)
    except OSError:
        return None
    return socket.socket(fileno=found[0]) if found else None


def _serve(link: socket.socket, configuration: _Configuration) -> int | None:
    """Run the hook that the client asks for; its exit status, or None if the client has asked for none.

    The process ends if the client goes before the hook's end.
    """
    link.settimeout(REQUEST_S)
    try:
        word, environment = _request(link)
        if word not in slurmctld.HOOKS:
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
    link.settimeout(None)
    watch = _Watch(link)
    status = slurmctld.entry(word, None if "VHPC_CONFIG" in os.environ else configuration.current())
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
    """Descriptors for stdout and stderr: with them the client confirms that it still waits."""
    start, streams, _, _ = socket.recv_fds(link, 1, 2)
    if start != b"S" or len(streams) != 2:
        raise EOFError
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
