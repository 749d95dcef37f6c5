# SPDX-License-Identifier: Apache-2.0
"""Floods a TCP port, within bounds: what an ordinary user can do to vhpcd, or to a stand-in of it.

Run as ``python3 flood.py KIND HOST PORT SECONDS [MUNGE_SOCKET]`` by the user who
attacks; it says how many connections it made.  It uses nothing of vhpc.

KIND is one of

- ``silent``: 1,100 connections that say nothing, each made again when it is closed
- ``payload``: 100 connections that send 1 MiB of a credential less the last byte, again and again
- ``storm``: connections that are closed at once, at most 4,000 a second
- ``stranger``: true credentials of this user, of 256 KiB each, 8 at a time
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import subprocess
import sys
import time

WANTED = {"silent": 1100, "payload": 100, "storm": 50, "stranger": 8}
PER_SECOND = 4000


def payload(kind: str, munge: str) -> bytes:
    if kind == "payload":
        return struct.pack(">I", 1 << 20) + b"MUNGE:" + b"A" * ((1 << 20) - 7)
    if kind == "stranger":
        command = ["munge", "--zip=none", *([f"--socket={munge}"] if munge else [])]
        sealed = subprocess.run(
            command, input=os.urandom(190 << 10), capture_output=True, check=True
        ).stdout.strip()
        return struct.pack(">I", len(sealed)) + sealed
    return b""


def main(kind: str, host: str, port: str, seconds: str, munge: str = "") -> None:
    place = (socket.gethostbyname(host), int(port))
    until = time.monotonic() + float(seconds)
    data = payload(kind, munge)
    open_ones: dict[int, tuple[socket.socket, int]] = {}
    poll = select.poll()
    made, second, this_second = 0, 0.0, 0
    while (now := time.monotonic()) < until:
        if now - second >= 1.0:
            second, this_second = now, 0
        while len(open_ones) < WANTED[kind] and this_second < PER_SECOND:
            one = socket.socket()
            one.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                one.connect(place)
            wanted = select.POLLIN | (select.POLLOUT if data or kind == "storm" else 0)
            poll.register(one, wanted)
            open_ones[one.fileno()] = (one, 0)
            made, this_second = made + 1, this_second + 1
        for number, event in poll.poll(50):
            one, sent = open_ones[number]
            over = bool(event & (select.POLLERR | select.POLLHUP | select.POLLIN)) or kind == "storm"
            if not over and event & select.POLLOUT:
                try:
                    sent += one.send(data[sent : sent + 65536])
                except BlockingIOError:
                    pass
                except OSError:
                    over = True
                open_ones[number] = (one, sent)
                if sent == len(data):
                    poll.modify(one, select.POLLIN)
            if over:
                poll.unregister(one)
                one.close()
                del open_ones[number]
    print(f"made {made} connections", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
