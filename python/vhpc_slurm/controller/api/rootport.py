# SPDX-License-Identifier: Apache-2.0
"""Connections that show that root makes them: from a port below 1024 (privileged, ip(7)).

vhpcd keeps a queue and room for such connections that no other user of the host can
fill.  Where none of these ports is free, or we are not root, any port will do.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import socket
import time

FIRST, LAST = 665, 1023
"""As NFS clients have them: services below are many."""
SERVICES = frozenset({749, 750, 751, 754, 783, 853, 873, 989, 990, 992, 993, 995})
"""Ports of that range that services listen on, which would find them taken."""
TRIES = 24
_TAKEN = (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES, errno.EPERM)


def connect(host: str, port: int, deadline: float) -> socket.socket:
    """A connection to the first address of a host that answers; times of ``time.monotonic``.

    Raises:
        OSError: none answers in time.
    """
    last: OSError = TimeoutError("timed out")
    for family, kind, proto, _, place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
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
    """Let the other end close first: whoever closes first cannot use his port again for a minute."""
    with contextlib.suppress(OSError):
        link.settimeout(seconds)
        link.recv(1)
