# SPDX-License-Identifier: Apache-2.0
"""Runs on the node as `python3 -c`: two plain guests, between which the way of packets is changed by turns.

It needs network and mount namespaces of its own (`unshare --net --mount`), in which all that it makes ends.
"""

import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

BOOT_S, RESULT_S = 240, 120
KEPT, SHOWN = 1 << 20, 800  # bytes of a console
HERE, THERE = "vhpcbench-a", "vhpcbench-b"  # network namespaces


def ip(*words: str, namespace: str = HERE) -> None:
    """Run ip(8)."""
    subprocess.run(["ip", "-n", namespace, *words], check=True, timeout=60)


def inside(namespace: str, *words: str, stdin: str = "", check: bool = True) -> None:
    """Run a command in a network namespace."""
    command = ["ip", "netns", "exec", namespace, *words]
    quiet = None if check else subprocess.DEVNULL
    subprocess.run(command, input=stdin, text=True, check=check, timeout=60, stderr=quiet)


class Network:
    """The network between the taps of both guests."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._taps, self._macs = order["taps"], order["macs"]
        self._bridge, self._vxlan, self._vni = order["bridge"], order["vxlan"], str(order["vni"])
        self._port, self._firewalls = str(order["port"]), order["firewalls"]
        self._underlays, self._closed = order["underlays"], order["closed"]
        # names of namespaces are files, which would remain
        Path("/run/netns").mkdir(exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/run/netns"], check=True, timeout=60)
        subprocess.run(["ip", "netns", "attach", HERE, str(os.getpid())], check=True, timeout=60)
        subprocess.run(["ip", "netns", "add", THERE], check=True, timeout=60)
        several = ("multi_queue",) if order["queues"] > 1 else ()
        for tap in self._taps:
            ip("tuntap", "add", tap, "mode", "tap", *several)
        # room for VXLAN, so that guests have the same MTU in all cases
        ip("link", "add", "under0", "mtu", "1600", "type", "veth", "peer", "name", "under1", "netns", THERE)
        for place, namespace in enumerate((HERE, THERE)):
            ip("address", "add", f"{self._underlays[place]}/30", "dev", f"under{place}", namespace=namespace)
            ip("link", "set", f"under{place}", "mtu", "1600", "up", namespace=namespace)

    def change(self, case: str) -> None:
        """Make the way of packets that a case names."""
        self._clear()
        filtered = case.endswith("+firewall")
        way = case.removesuffix("+firewall")
        if filtered:
            for namespace, rules in zip((HERE, THERE), self._firewalls, strict=True):
                inside(namespace, "nft", "-f", "-", stdin=rules)
        if way == "direct":
            for tap, other in (self._taps, self._taps[::-1]):
                inside(HERE, "tc", "qdisc", "add", "dev", tap, "clsact")
                words = ("matchall", "action", "mirred", "egress", "redirect", "dev", other)
                inside(HERE, "tc", "filter", "add", "dev", tap, "ingress", *words)
        elif way in ("bridge", "closed"):
            self._make_bridge(HERE, self._taps, closed=way == "closed")
        elif way == "vxlan":
            ip("link", "set", self._taps[1], "netns", THERE)
            for place, namespace in enumerate((HERE, THERE)):
                kind = ("type", "vxlan", "id", self._vni, "dstport", self._port, "nolearning")
                ip(
                    *("link", "add", self._vxlan, "mtu", "1500", *kind, "local", self._underlays[place]),
                    namespace=namespace,
                )
                self._make_bridge(namespace, [self._taps[place], self._vxlan], closed=True)
                remote = ("dev", self._vxlan, "dst", self._underlays[1 - place], "self", "permanent")
                inside(namespace, "bridge", "fdb", "append", self._macs[1 - place], *remote)
                ip("link", "set", self._vxlan, "up", namespace=namespace)
        for place, tap in enumerate(self._taps):
            ip("link", "set", tap, "up", namespace=THERE if place and way == "vxlan" else HERE)

    def _make_bridge(self, namespace: str, ports: list[str], *, closed: bool) -> None:
        """A bridge; ``closed``: with settings of ports as a job's has them, which knows both guests."""
        snooping = ("mcast_snooping", "0") if closed else ()
        ip("link", "add", self._bridge, "type", "bridge", *snooping, namespace=namespace)
        for port in ports:
            ip("link", "set", port, "master", self._bridge, namespace=namespace)
            if closed:
                inside(namespace, "bridge", "link", "set", "dev", port, *self._closed)
        for place, mac in enumerate(self._macs) if closed else ():
            here = place == (namespace == THERE)
            port = self._taps[place] if len({*ports} & {*self._taps}) == 2 or here else self._vxlan
            inside(namespace, "bridge", "fdb", "add", mac, "dev", port, "master", "static")
        ip("link", "set", self._bridge, "up", namespace=namespace)

    def _clear(self) -> None:
        inside(THERE, "ip", "link", "set", self._taps[1], "netns", HERE, check=False)
        for tap in self._taps:
            ip("link", "set", tap, "nomaster", "up")
            inside(HERE, "tc", "qdisc", "del", "dev", tap, "clsact", check=False)
        for namespace in (HERE, THERE):
            for name in (self._bridge, self._vxlan):
                inside(namespace, "ip", "link", "del", name, check=False)
            inside(namespace, "nft", "flush", "ruleset")


class Guests:
    """Both guests, the last one of which prints results."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._marker = order["marker"].encode()
        self._guests = [
            subprocess.Popen(
                ["taskset", "-c", guest["cpus"], *guest["argv"]],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            for guest in order["guests"]
        ]
        self._consoles = {one.stdout.fileno(): bytearray() for one in self._guests if one.stdout}
        self._found: list[str] = []

    def ask(self) -> None:
        """Let the last guest measure."""
        asked = self._guests[-1].stdin
        assert asked is not None
        asked.write(b"\n")
        asked.flush()

    def results(self, count: int, limit_s: float) -> list[str]:
        """The next lines with the marker; fewer when a guest ends, or when the time is over.

        All consoles are read, because QEMU stops while the pipe of its console is full.
        """
        *_, last = self._consoles
        poll, until = select.poll(), time.monotonic() + limit_s
        for fd in self._consoles:
            poll.register(fd, select.POLLIN)
        while len(self._found) < count and (left := until - time.monotonic()) > 0:
            chunks = {fd: os.read(fd, 65536) for fd, _ in poll.poll(left * 1000)}
            for fd, chunk in chunks.items():
                self._consoles[fd] = (self._consoles[fd] + chunk)[-KEPT:]
            *lines, rest = self._consoles[last].split(b"\n")
            self._found += [
                line.partition(self._marker)[2].decode(errors="replace").strip()
                for line in lines
                if self._marker in line
            ]
            if any(self._marker in line for line in lines):
                self._consoles[last] = rest
            if not all(chunks.values()):
                break
        found, self._found = self._found[:count], self._found[count:]
        return found

    def said(self) -> str:
        """The end of all consoles."""
        return " / ".join(said[-SHOWN:].decode(errors="replace") for said in self._consoles.values())

    def end(self) -> None:
        """Kill both."""
        for one in self._guests:
            one.kill()
            one.wait()


def main() -> int:
    """As specified in the JSON of argv[1]; prints the lines of each case."""
    order = json.loads(sys.argv[1])
    network, cases = Network(order), order["cases"]
    network.change(cases[0])
    guests = Guests(order)
    lines: dict[str, list[str]] = {case: [] for case in cases}
    try:
        for number, case in enumerate(cases * order["repeats"]):
            # the first measurement waits for no line: a guest that still boots would lose it
            if number > 0 and len(cases) > 1:
                network.change(case)
                guests.ask()
            found = guests.results(1, RESULT_S if number > 0 else BOOT_S + RESULT_S)
            lines[case] += found
            if not found:
                break
    finally:
        guests.end()
    print(json.dumps({"lines": lines, "console": guests.said()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
