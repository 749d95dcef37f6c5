# SPDX-License-Identifier: Apache-2.0
"""Keeps munged of this host busy, within bounds: what any user of a node can do.

Run as ``python3 mungeflood.py CONNECTIONS SECONDS``: so many connections that say nothing, each made
again when munged closes it. It uses nothing of vhpc.
"""

from __future__ import annotations

import contextlib
import select
import socket
import sys
import time

SOCKET = "/run/munge/munge.socket.2"


def main(connections: int, seconds: float) -> None:
    until = time.monotonic() + seconds
    open_ones: dict[int, socket.socket] = {}
    poll, made = select.poll(), 0
    while time.monotonic() < until:
        while len(open_ones) < connections:
            one = socket.socket(socket.AF_UNIX)
            one.setblocking(False)
            try:
                one.connect(SOCKET)
            except OSError:  # its queue is full
                one.close()
                break
            made += 1
            open_ones[one.fileno()] = one
            poll.register(one, select.POLLIN)
        for number, _ in poll.poll(5):
            poll.unregister(number)
            with contextlib.suppress(KeyError):
                open_ones.pop(number).close()
    print(made)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
