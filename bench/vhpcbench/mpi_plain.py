# SPDX-License-Identifier: Apache-2.0
"""Runs on the node as `python3 -c`: two plain guests on a bridge; prints the line of one of them."""

import json
import subprocess
import sys
import time

DEADLINE_S = 240
BRIDGE = "vhpcbench"


def ip(*words: str) -> None:
    """Run ip(8)."""
    subprocess.run(["ip", *words], check=True, timeout=20)


def main() -> int:
    """Start both as specified in argv[1], wait for the line with the marker, end both."""
    order = json.loads(sys.argv[1])
    guests: list[subprocess.Popen[str]] = []
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
                    command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, errors="replace"
                )
            )
        found, said = listen(guests[-1], order["marker"])
    finally:
        for one in guests:
            one.kill()
            one.wait()
    print(json.dumps({"line": found, "console": said[-1500:]}))
    return 0


def listen(guest: "subprocess.Popen[str]", marker: str) -> "tuple[str, str]":
    """The rest of the console's line that has the marker, and all lines before."""
    assert guest.stdout is not None
    said, until = "", time.monotonic() + DEADLINE_S
    for line in guest.stdout:
        before, found, rest = line.partition(marker)
        if found:
            return rest.strip(), said
        said += before
        if time.monotonic() > until:
            break
    return "", said


if __name__ == "__main__":
    sys.exit(main())
