# SPDX-License-Identifier: Apache-2.0
"""Reads the P_Key tables of all ports of a fabric with subnet management packets (SMPs).

SMPs ignore partitions and are answered by the ports themselves, so the result does not
depend on the subnet manager or its file. Packets follow directed routes from the local
port (InfiniBand Architecture Specification 1, chapter 14), sent by libibmad.

That library may crash or wait for minutes, so it runs in a child process
(``python -m vhpc_slurm.fabric.smp``), which answers lines on its stdin with lines of
JSON; ``FabricReader`` is the parent's side.  The user needs access
to ``/dev/infiniband/umadN``.

A scan has two parts: it finds the ports, then it reads the table of each. The first
part may run while the subnet manager sweeps, the second only after the sweep. The routes
of the last scan are kept, so that the tables of a few ports can be read alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import struct
import sys
import time
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from vhpc_slurm.errors import FabricError
from vhpc_slurm.fabric.child import LineChild
from vhpc_slurm.undecodable import UNDECODABLE

NODE_INFO, SWITCH_INFO, PORT_INFO, PKEY_TABLE = 0x0011, 0x0012, 0x0015, 0x0016
SWITCH = 2
PORT_DOWN, PORT_ACTIVE = 1, 4
KEYS_A_BLOCK = 32
DEFAULT_FULL = 0xFFFF
MAX_HOPS = 63
SHOWN = 3
"""The most routes to silent nodes that a scan contains."""
_CLASSES = (0x81, 0x01)  # directed route, LID routed
_TIMEOUT_MS, _TRIES = 300, 3
"""How long a node may take to answer, and how often it is asked: packets of subnet management can get lost.

libibmad's own retries do not help: it gives up when its receive times out, which is when the kernel
would have sent again."""
_LOCAL_MS = 5000
"""The same for the local port."""
AHEAD_S = 2.0
"""Seconds for which found routes stay valid: moving a cable takes longer."""


@dataclass(frozen=True)
class Port:
    """A port of an adapter or a router: its GUID, whether it is the local port, and its keys.

    ``pkeys`` are the 16-bit entries in the order of the table, without empty ones.
    ``master`` says that the port's own master subnet manager is at this port,
    ``room`` is how many entries its table has.
    """

    guid: int
    local: bool
    active: bool
    pkeys: tuple[int, ...]
    master: bool = False
    room: int = 0


@dataclass(frozen=True)
class Switch:
    """A switch: how many keys one of its ports can enforce, and its room for multicast groups."""

    guid: int
    enforced: int
    groups: int


@dataclass(frozen=True)
class Scan:
    """All end ports and switches that were found, and what could not be read.

    ``silent`` nodes did not answer; ``silent_at`` are directed routes to some of
    them, as ``smpquery -D`` takes them; ``unread`` are subnets that could not be
    read at all, each with the reason.
    """

    ports: tuple[Port, ...]
    silent: int = 0
    switches: tuple[Switch, ...] = ()
    silent_at: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()

    def tables(self) -> dict[int, tuple[int, ...]]:
        """Keys by port GUID."""
        return {port.guid: port.pkeys for port in self.ports}


class FabricReader:
    """Reads tables with a child process, which is started when needed and again after a failure."""

    def __init__(self, device: str = "", port: int = 0, environment: Mapping[str, str] | None = None) -> None:
        """``device`` and ``port`` select the local port; empty and 0: the first one that is up."""
        self._child = LineChild(
            [sys.executable, "-m", "vhpc_slurm.fabric.smp", device, str(port)], environment
        )
        self._looked = float("-inf")

    def look_ahead(self) -> None:
        """Begin to find the ports: a scan that follows soon only reads their tables."""
        with contextlib.suppress(OSError, EOFError):  # the scan reports it
            self._child.say(LOOK)
            self._looked = time.monotonic()

    def scan(self, timeout_s: float) -> Scan:
        """Read everything once.

        Raises:
            FabricError: there is no valid answer in time.
        """
        looked, self._looked = self._looked, float("-inf")
        return self._ask(TABLES if time.monotonic() - looked < AHEAD_S else SCAN, timeout_s)

    def ports(self, guids: Collection[int], timeout_s: float) -> tuple[Port, ...]:
        """Read the tables of some ports, without those that are not where the last scan found them.

        Raises:
            FabricError: there is no valid answer in time.
        """
        words = " ".join(f"{guid:x}" for guid in sorted(guids))
        return self._ask(PORTS + b" " + words.encode(), timeout_s).ports

    def _ask(self, line: bytes, timeout_s: float) -> Scan:
        try:
            found: _Answer = msgspec.json.decode(self._child.ask(line, timeout_s), type=_Answer)
        except (OSError, EOFError, *UNDECODABLE) as err:
            self.close()
            raise FabricError(
                "cannot read the fabric",
                str(err),
                "check that the port is up; see fabric.device in vhpc.toml",
            ) from err
        if found.scan is None:
            self.close()
            raise FabricError("cannot read the fabric", found.error)
        return found.scan

    def close(self) -> None:
        """End the child."""
        self._child.close()


SCAN, LOOK, TABLES, PORTS = b"scan", b"look", b"tables", b"ports"
"""Requests to the child: read all; find the ports (no answer); read the tables of the found ports;
read the tables of the ports whose GUIDs follow, in hexadecimal."""


class _Answer(msgspec.Struct, frozen=True):
    scan: Scan | None = None
    error: str = ""


# --- the child ------------------------------------------------------------------


class _DirectedRoute(ctypes.Structure):
    # ib_dr_path_t of <infiniband/mad.h>
    _fields_ = (
        ("cnt", ctypes.c_int),
        ("p", ctypes.c_uint8 * 64),
        ("drslid", ctypes.c_uint16),
        ("drdlid", ctypes.c_uint16),
    )


class _PortId(ctypes.Structure):
    # ib_portid_t of <infiniband/mad.h>
    _fields_ = (
        ("lid", ctypes.c_int),
        ("drpath", _DirectedRoute),
        ("grh_present", ctypes.c_int),
        ("gid", ctypes.c_uint8 * 16),
        ("qp", ctypes.c_uint32),
        ("qkey", ctypes.c_uint32),
        ("sl", ctypes.c_uint8),
        ("pkey_idx", ctypes.c_uint),
    )


_VIA = (
    ctypes.c_void_p,
    ctypes.POINTER(_PortId),
    ctypes.c_uint,
    ctypes.c_uint,
    ctypes.c_uint,
    ctypes.c_void_p,
)
"""Arguments of smp_query_via(3) and smp_set_via(3)."""


class SmpPort:
    """A local port that sends subnet management packets (SMPs)."""

    def __init__(self, device: str, port: int) -> None:
        """Open a port of an adapter; an empty ``device``: of the first, 0: the first that is up.

        Raises:
            OSError: it cannot be opened.
        """
        library = ctypes.CDLL("libibmad.so.5")
        library.mad_rpc_open_port.restype = ctypes.c_void_p
        library.mad_rpc_set_retries.argtypes = [ctypes.c_void_p, ctypes.c_int]
        for function in (library.smp_query_via, library.smp_set_via):
            function.restype = ctypes.c_void_p
            function.argtypes = _VIA
        classes = (ctypes.c_int * len(_CLASSES))(*_CLASSES)
        self._library = library
        self._port = library.mad_rpc_open_port(device.encode() or None, port, classes, len(_CLASSES))
        if not self._port:
            raise OSError(f"cannot open the management device of {device or 'any adapter'}, port {port}")
        library.mad_rpc_set_retries(self._port, 1)

    def get(self, path: tuple[int, ...], attribute: int, modifier: int = 0) -> bytes | None:
        """64 bytes of an attribute of the node at the end of a route; None when it does not answer."""
        return self.send("smp_query_via", path, attribute, modifier, b"")

    def send(
        self, method: str, path: tuple[int, ...], attribute: int, modifier: int, data: bytes
    ) -> bytes | None:
        """Send up to 64 bytes by ``smp_query_via`` or ``smp_set_via``; the answer, None without one.

        A node is silent only if the local port answers meanwhile: otherwise nothing could be received,
        and the node is asked again.
        """
        if not path:
            return self._once(method, path, attribute, modifier, data, _LOCAL_MS)
        for _ in range(_TRIES):
            answer = self._once(method, path, attribute, modifier, data, _TIMEOUT_MS)
            if answer is not None or self._once("smp_query_via", (), NODE_INFO, 0, b"", _LOCAL_MS) is None:
                return answer
        return None

    def _once(
        self, method: str, path: tuple[int, ...], attribute: int, modifier: int, data: bytes, timeout_ms: int
    ) -> bytes | None:
        target = _PortId()
        target.drpath.cnt = len(path)
        for hop, port in enumerate(path, 1):
            target.drpath.p[hop] = port
        buffer = ctypes.create_string_buffer(data, 64)
        call: Any = getattr(self._library, method)
        if not call(buffer, ctypes.byref(target), attribute, modifier, timeout_ms, self._port):
            return None
        return buffer.raw


@dataclass
class _Found:
    """Ports without their keys, the ways to them, their numbers on their nodes; and switches."""

    ports: dict[int, tuple[tuple[int, ...], int, Port]] = field(default_factory=dict)
    switches: dict[int, Switch] = field(default_factory=dict)
    silent: list[tuple[int, ...]] = field(default_factory=list)


def _look(mad: SmpPort) -> _Found:
    """All end ports that can be reached, each once."""
    found = _Found()
    routes: deque[tuple[int, ...]] = deque([()])
    while routes:
        path = routes.popleft()
        node = mad.get(path, NODE_INFO)
        if node is None:
            found.silent.append(path)
            continue
        kind, count, node_guid, port_guid, cap, number = struct.unpack_from(">2xBB8xQQH6xB", node)
        if kind == SWITCH:
            if node_guid not in found.switches and len(path) < MAX_HOPS:
                found.switches[node_guid] = _switch(mad, path, node_guid)
                routes.extend(
                    (*path, port) for port in range(1, count + 1) if _state(mad, path, port) > PORT_DOWN
                )
            continue
        if port_guid in found.ports:
            continue
        info = mad.get(path, PORT_INFO, number)
        if info is None:
            found.silent.append(path)
            continue
        found.ports[port_guid] = (path, number, _port(port_guid, path, info, cap))
        if not path:
            routes.append((number,))
    return found


def _read(mad: SmpPort, found: _Found) -> Scan:
    """The tables of these ports."""
    ports = []
    silent = list(found.silent)
    for guid in sorted(found.ports):
        path, number, port = found.ports[guid]
        pkeys = _table(mad, path, port.room)
        if pkeys is not None and (port.master or DEFAULT_FULL in pkeys):
            # A sweep meanwhile may have moved the master, whose port alone may have this key.
            info = mad.get(path, PORT_INFO, number)
            pkeys = None if info is None else pkeys
            port = port if info is None else _port(guid, path, info, port.room)
        if pkeys is None:
            silent.append(path)
        else:
            ports.append(replace(port, pkeys=pkeys))
    where = tuple(",".join(map(str, (0, *path))) for path in silent[:SHOWN])
    return Scan(tuple(ports), len(silent), tuple(found.switches.values()), where)


def _still_there(mad: SmpPort, known: _Found, guids: list[int]) -> _Found:
    """Those of some ports that are at the ends of their known routes."""
    found = _Found()
    for guid in guids:
        if guid in known.ports:
            node = mad.get(known.ports[guid][0], NODE_INFO)
            if node is not None and struct.unpack_from(">20xQ", node) == (guid,):
                found.ports[guid] = known.ports[guid]
    return found


def _port(guid: int, path: tuple[int, ...], info: bytes, room: int) -> Port:
    lid, master = struct.unpack_from(">16xHH", info)
    return Port(guid, not path, info[32] & 0x0F == PORT_ACTIVE, (), lid != 0 and lid == master, room)


def _switch(mad: SmpPort, path: tuple[int, ...], guid: int) -> Switch:
    info = mad.get(path, SWITCH_INFO)
    groups, enforced = struct.unpack_from(">4xH8xH", info) if info is not None else (0, 0)
    return Switch(guid, enforced, groups)


def _state(mad: SmpPort, path: tuple[int, ...], port: int) -> int:
    """The logical state of a port; 0 when it does not answer."""
    info = mad.get(path, PORT_INFO, port)
    return info[32] & 0x0F if info is not None else 0


def _table(mad: SmpPort, path: tuple[int, ...], cap: int) -> tuple[int, ...] | None:
    entries: list[int] = []
    for block in range((cap + KEYS_A_BLOCK - 1) // KEYS_A_BLOCK):
        raw = mad.get(path, PKEY_TABLE, block)
        if raw is None:
            return None
        entries += struct.unpack(f">{KEYS_A_BLOCK}H", raw)
    return tuple(entry for entry in entries if entry & 0x7FFF)


def main(arguments: list[str]) -> int:
    """The child: device and port as arguments, requests as lines on stdin."""
    device, port = arguments[0], int(arguments[1])
    mad: SmpPort | None = None
    found: _Found | None = None
    known = _Found()
    for line in sys.stdin.buffer:
        told, *guids = line.split()
        try:
            mad = mad or SmpPort(device, port)
            if told == PORTS:
                answer = _Answer(_read(mad, _still_there(mad, known, [int(guid, 16) for guid in guids])))
            else:
                if told != TABLES or found is None:
                    known = found = _look(mad)
                if told == LOOK:
                    continue
                answer = _Answer(_read(mad, found))
                if answer.scan is not None and not answer.scan.ports:
                    answer = _Answer(error="the local port does not answer")
        except OSError as err:
            answer = _Answer(error=str(err))
        found = None
        if told != LOOK:
            sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
            sys.stdout.buffer.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
