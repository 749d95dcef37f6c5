# SPDX-License-Identifier: Apache-2.0
"""Runs on the node as `python3 -c`: two plain guests on a bridge; prints the line of one of them."""

import json
import os
import select
import subprocess
import sys
import time

BRIDGE = "vhpcbench"
KEPT, SHOWN = 1 << 20, 800  # bytes of a console


def ip(*words: str) -> None:
    """Run ip(8)."""
    subprocess.run(["ip", *words], check=True, timeout=20)


def main() -> int:
    """Start both as specified in argv[1], wait for the line with the marker, end both."""
    order = json.loads(sys.argv[1])
    guests: list[subprocess.Popen[bytes]] = []
    taps = [f"{BRIDGE}{number}" for number in range(len(order["guests"]))]
    try:
        ip("link", "add", BRIDGE, "type", "bridge")
        ip("link", "set", BRIDGE, "up")
        for tap in taps:
            ip("tuntap", "add", tap, "mode", "tap")
            ip("link", "set", tap, "master", BRIDGE, "up")
        for guest in order["guests"]:
            command = ["taskset", "-c", guest["cpus"], *guest["argv"]]
            guests.append(
                subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
                )
            )
        found, said = listen(guests, order["marker"].encode(), order["deadline_s"])
    finally:
        for one in guests:
            one.kill()
            one.wait()
    print(json.dumps({"line": found, "console": said}))
    return 0


def listen(guests: "list[subprocess.Popen[bytes]]", marker: bytes, deadline_s: float) -> "tuple[str, str]":
    """The rest of the line with the marker on the last guest's console, and the end of all consoles.

    All consoles are read, because QEMU waits for ever when a pipe is full. It ends when
    a guest ends, and at the deadline.
    """
    consoles = {one.stdout.fileno(): bytearray() for one in guests if one.stdout is not None}
    *_, last = consoles
    found, until = "", time.monotonic() + deadline_s
    poll = select.poll()
    for fd in consoles:
        poll.register(fd, select.POLLIN)
    while not found and (left := until - time.monotonic()) > 0:
        chunks = {fd: os.read(fd, 65536) for fd, _ in poll.poll(left * 1000)}
        for fd, chunk in chunks.items():
            consoles[fd] = (consoles[fd] + chunk)[-KEPT:]
        line = consoles[last].partition(marker)[2]
        found = line.partition(b"\n")[0].decode(errors="replace").strip() if b"\n" in line else ""
        if not all(chunks.values()):
            break
    return found, " / ".join(said[-SHOWN:].decode(errors="replace") for said in consoles.values())


if __name__ == "__main__":
    sys.exit(main())
