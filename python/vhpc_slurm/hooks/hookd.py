# SPDX-License-Identifier: Apache-2.0
"""vhpc-hookd: has the modules of slurmctld's hooks in memory, in children that run the hooks.

Python's start and imports cost ten times as much as what PrologSlurmctld and EpilogSlurmctld do.
The programs of these names (``hookd/``) ask this process over a socket, and run a Python of their
own without it.  A child serves its client alone, from reading the request (``hookd/ask.c``) to
sending the exit status, so that nothing is lost when this process ends.  Then it waits for another
client: a fork, with the pages that the child copies, costs as much as half of a hook.  A child has
one client at a time, so as many children as there are hooks run at once.
"""
# Decision: A process of slurmctld's host forks for its hooks

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from vhpc_slurm.controller import exchange
from vhpc_slurm.hooks import serving, slurmctld, start
from vhpc_slurm.hooks.serving import Configuration, Hook

SOCKET = Path("/run/vhpc-hookd/socket")
"""In a folder that only SlurmUser may enter; hookd/CMakeLists.txt names it as well."""
IDLE = 4
"""How many children wait for another hook at most; each has 4 MiB of its own."""
HOOKS = 100
"""How many hooks a child runs at most: it never collects garbage."""
KNOWN = 200
"""From so many children on, further ones run one hook: each of the others takes a descriptor here."""
BACKLOG = 4096
"""Clients that may wait; more run without this process."""


def entry() -> int:
    """Process entry point: serve until the package is replaced."""
    installed = start.version()
    with serving.listen(SOCKET, BACKLOG) as listener:
        _prepare()
        children = _Children(listener)
        while True:
            with children.accept() as link:
                # The client runs its hook with the new files, and systemd starts this process again.
                if start.mixed(installed):
                    return 0
                if serving.is_allowed(serving.peer(link)[1]):
                    children.give(link)


class _Children:
    """The children, and those of them that wait for a hook."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._configuration = Configuration()
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


def _prepare() -> None:
    """Do once what each hook would do again, and let the kernel reap the children."""
    exchange.preload()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    gc.disable()  # a collection in a child would copy all pages


def _work(parent: socket.socket, link: socket.socket, configuration: Configuration, most: int) -> None:
    """Serve at most so many clients one after another, first ``link``; the process ends with it."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setpgid(0, 0)
    hooks: Mapping[str, Hook] = {word: partial(slurmctld.entry, word) for word in slurmctld.HOOKS}
    nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    for left in reversed(range(most)):
        with link:
            status = serving.serve(link, hooks, configuration)
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
