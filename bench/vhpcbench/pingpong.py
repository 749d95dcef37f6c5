# SPDX-License-Identifier: Apache-2.0
"""Runs by itself in two guests: a TCP ping-pong, and streams; rank 1 prints the results as JSON.

The median of half round trips in microseconds, and the bandwidth of all streams in MiB/s.

With --asked, rank 1 waits for a line of input before each repetition but the first.
Each wait for the other rank has a limit, so that one rank ends if the other one does not come or ends.
"""

import argparse
import json
import socket
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

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


def at_once(work: Callable[[socket.socket], None], peers: list[socket.socket]) -> None:
    """Do the work for all connections at the same time."""
    with ThreadPoolExecutor(len(peers)) as pool:
        list(pool.map(work, peers))


def swallow(peer: socket.socket) -> None:
    """Read a stream and confirm it."""
    buffer, left = bytearray(CHUNK), CHUNK * CHUNKS
    while left > 0:
        got = peer.recv_into(buffer)
        if got == 0:
            raise ConnectionError("the other rank has ended")
        left -= got
    peer.sendall(b"x")


def stream(peer: socket.socket) -> None:
    """Write a stream and wait until it is confirmed."""
    chunk = memoryview(bytearray(CHUNK))
    for _ in range(CHUNKS):
        peer.sendall(chunk)
    byte(peer)


def serve(repeats: int, streams: int) -> None:
    """Return each byte, then swallow the streams; as often as the other rank asks."""
    with socket.create_server(("0.0.0.0", PORT), backlog=streams) as listener:  # noqa: S104 - rank 1 is in another guest
        listener.settimeout(CONNECT_S)
        peers = [listener.accept()[0] for _ in range(streams)]
    first = peers[0]
    for peer in peers:
        peer.settimeout(ANSWER_S)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for _ in range(repeats):
        first.settimeout(None)  # rank 1 may wait for its input
        for _ in range(WARM + PINGS):
            first.sendall(byte(first))
            first.settimeout(ANSWER_S)
        at_once(swallow, peers)
    first.recv(1)


def connect(host: str, until: float) -> socket.socket:
    """A connection to rank 0, which may still boot."""
    while True:
        try:
            peer = socket.create_connection((host, PORT), timeout=2)
            break
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)
    peer.settimeout(ANSWER_S)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return peer


def ask(host: str, repeats: int, streams: int, *, asked: bool) -> None:
    """Measure."""
    until = time.monotonic() + CONNECT_S
    peers = [connect(host, until) for _ in range(streams)]
    for number in range(repeats):
        if asked and number > 0:
            sys.stdin.readline()
        measure(peers)


def measure(peers: list[socket.socket]) -> None:
    """One result: the ping-pong by the first connection, then a stream by each."""
    halves = []
    for _ in range(WARM + PINGS):
        began = time.perf_counter()
        peers[0].sendall(b"x")
        byte(peers[0])
        halves.append((time.perf_counter() - began) / 2 * 1e6)
    began = time.perf_counter()
    at_once(stream, peers)
    took = time.perf_counter() - began
    mib = len(peers) * CHUNK * CHUNKS / (1 << 20)
    print(
        "bench-pingpong:",
        json.dumps({"us": statistics.median(halves[WARM:]), "mib_s": mib / took}),
        flush=True,
    )


def main() -> None:
    """One rank, from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rank", choices=("0", "1"))
    parser.add_argument("host")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--streams", type=int, default=1, help="streams at the same time")
    parser.add_argument("--asked", action="store_true")
    args = parser.parse_args()
    if args.rank == "0":
        serve(args.repeats, args.streams)
    else:
        ask(args.host, args.repeats, args.streams, asked=args.asked)


if __name__ == "__main__":
    main()
