# SPDX-License-Identifier: Apache-2.0
"""Connections from a port below 1024, which only root can bind (ip(7)).

vhpcd has a queue and room for such connections that other users of the host cannot
fill; nodes that serve blobs accept no others. Any port is used where none of these is free,
or where the caller is not root.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import socket
import time

FIRST, LAST = 665, 1023
"""The range of NFS clients; many services use lower ports."""
SERVICES = frozenset({749, 750, 751, 754, 783, 853, 873, 989, 990, 992, 993, 995})
"""Ports of that range on which services listen: a service could not start while a client has its port."""
TRIES = 24
_TAKEN = (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES, errno.EPERM)


def connect(host: str, port: int, deadline: float) -> socket.socket:
    """Connect to the first address of a host that answers; ``deadline`` by ``time.monotonic``.

    Raises:
        OSError: none answers in time.
    """
    last: OSError = TimeoutError("timed out")
    # as bytes, a name does not go through Python's codec for international names: 2 ms of imports
    name = host.encode() if host.isascii() else host
    for family, kind, proto, _, place in socket.getaddrinfo(name, port, type=socket.SOCK_STREAM):
        ports = random.sample(range(FIRST, LAST + 1), TRIES) if os.geteuid() == 0 else []
        for own in (*(one for one in ports if one not in SERVICES), 0):
            left = deadline - time.monotonic()
            if left <= 0:
                raise last
            made = socket.socket(family, kind | socket.SOCK_CLOEXEC, proto)
            try:
                made.settimeout(left)
                if own:
                    made.bind(("", own))
                made.connect(place)
            except OSError as err:
                made.close()
                last = err
                if own and err.errno in _TAKEN:
                    continue
                break
            return made
    raise last


def wait_for_end(link: socket.socket, seconds: float) -> None:
    """Let the other end close first: the end that closes first cannot reuse its port for a minute."""
    with contextlib.suppress(OSError):
        link.settimeout(seconds)
        link.recv(1)


def left(deadline: float) -> float:
    """Seconds until a deadline of ``time.monotonic``; TimeoutError if it is over."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError("timed out")
    return seconds


def receive(link: socket.socket, length: int, deadline: float) -> bytes:
    """So many bytes.

    Raises:
        OSError: they have not come by the deadline, or the connection broke.
        EOFError: the other end has closed it before.
    """
    data = bytearray()
    while len(data) < length:
        link.settimeout(left(deadline))
        chunk = link.recv(min(length - len(data), 65536))
        if not chunk:
            raise EOFError("connection closed")
        data += chunk
    return bytes(data)
