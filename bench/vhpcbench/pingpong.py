# SPDX-License-Identifier: Apache-2.0
"""Runs by itself in two guests: a TCP ping-pong; rank 1 prints half round trips and bandwidth as JSON.

pingpong.py RANK HOST [REPEATS [asked]]: with `asked`, rank 1 waits for a line of input before each
but the first.
Each wait for the other rank has a limit, so that one rank ends if the other one does not come or ends.
"""

import json
import socket
import statistics
import sys
import time

PORT = 7700
PINGS, WARM = 600, 50
CHUNK, CHUNKS = 1 << 20, 64
CONNECT_S, ANSWER_S = 120, 60


def byte(peer: socket.socket) -> bytes:
    """The next byte."""
    got = peer.recv(1)
    if not got:
        raise ConnectionError("the other rank has ended")
    return got


def serve(repeats: int) -> None:
    """Return each byte, then swallow the stream and confirm it; as often as the other rank asks."""
    with socket.create_server(("0.0.0.0", PORT)) as listener:  # noqa: S104 - in a guest of this benchmark
        listener.settimeout(CONNECT_S)
        peer, _ = listener.accept()
    with peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        buffer = bytearray(CHUNK)
        for _ in range(repeats):
            peer.settimeout(None)  # rank 1 may wait for its input
            for _ in range(WARM + PINGS):
                peer.sendall(byte(peer))
                peer.settimeout(ANSWER_S)
            left = CHUNK * CHUNKS
            while left > 0:
                got = peer.recv_into(buffer)
                if got == 0:
                    raise ConnectionError("the other rank has ended")
                left -= got
            peer.sendall(b"x")
        peer.recv(1)


def ask(host: str, repeats: int, asked: bool) -> None:
    """Measure."""
    until = time.monotonic() + CONNECT_S
    while True:
        try:
            peer = socket.create_connection((host, PORT), timeout=2)
            break
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)
    with peer:
        peer.settimeout(ANSWER_S)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for number in range(repeats):
            if asked and number > 0:
                sys.stdin.readline()
            measure(peer)


def measure(peer: socket.socket) -> None:
    """One result."""
    halves = []
    for _ in range(WARM + PINGS):
        began = time.perf_counter()
        peer.sendall(b"x")
        byte(peer)
        halves.append((time.perf_counter() - began) / 2 * 1e6)
    chunk = memoryview(bytearray(CHUNK))
    began = time.perf_counter()
    for _ in range(CHUNKS):
        peer.sendall(chunk)
    byte(peer)
    took = time.perf_counter() - began
    result = {"us": statistics.median(halves[WARM:]), "mib_s": CHUNK * CHUNKS / (1 << 20) / took}
    print("bench-pingpong:", json.dumps(result), flush=True)


def main() -> None:
    """One rank, from the command line."""
    rank, host, repeats, asked = (*sys.argv[1:], *("", "1", "")[len(sys.argv) - 2 :])
    if rank == "0":
        serve(int(repeats))
    else:
        ask(host, int(repeats), asked == "asked")


if __name__ == "__main__":
    main()
