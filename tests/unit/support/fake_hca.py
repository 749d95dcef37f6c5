# SPDX-License-Identifier: Apache-2.0
"""Adapters whose virtual functions are set through netlink or sysfs, as the kernel's drivers take it.

============================  ====================================================================
netlink                       net/core/rtnetlink.c (do_setvfinfo: EINVAL without the nested list,
                              EOPNOTSUPP for what the driver has no operation for; rtnl_fill_vfinfo)
InfiniBand by netlink         drivers/infiniband/ulp/ipoib/ipoib_main.c, hw/mlx5/ib_virt.c: GUIDs are
                              remembered (vfs_ctx), link state becomes a policy, EINVAL for others
Ethernet by netlink           drivers/net/ethernet/intel/igb/igb_main.c: MAC of multicast is EINVAL,
                              VLAN above 4095 is EINVAL, any rate is while the link is down, no link
                              state (EOPNOTSUPP)
``sriov/N``                   MLNX_OFED drivers/net/ethernet/mellanox/mlx5/core/sriov_sysfs.c:
                              ``aa:bb:..`` of eight bytes, ``Down``, ``Up``, ``Follow`` with a newline
``iov``                       drivers/infiniband/hw/mlx4/sysfs.c: ``pkey_idx`` takes a number below the
                              table's length or ``no..``; ``admin_guids`` 64 bits of hexadecimal digits
============================  ====================================================================
"""

from __future__ import annotations

import contextlib
import errno
import re
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from attribute_fs import Attribute, fixed
from fake_pci import FakePci
from fake_pci_device import Device, fail

IB, ETHERNET = 32, 1
ALL_ONES = (1 << 64) - 1


@dataclass
class Port:
    """One virtual function as the adapter has it."""

    mac: bytes = bytes(6)
    vlan: int = 0
    spoofchk: int = 0
    trust: int = 0
    state: int = 0
    rate: tuple[int, int] = (0, 0)
    node_guid: int = 0
    port_guid: int = 0


@dataclass
class Interface:
    """A physical function's network interface; ``deaf`` are attributes that it takes and forgets."""

    kind: int
    ports: dict[int, Port]
    operations: frozenset[int]
    deaf: set[int] = field(default_factory=set)
    refuse: dict[int, int] = field(default_factory=dict)
    log: list[int] = field(default_factory=list)
    link_up: bool = True


IGB = frozenset((1, 2, 4, 6, 9))
IPOIB = frozenset((5, 10, 11))


class FakeRtnetlink:
    """The kernel's end of rtnetlink, for interfaces by their number.

    ``connect`` is a client's socket, from any process; a context manager.
    """

    def __init__(self, path: Path) -> None:
        self.interfaces: dict[int, Interface] = {}
        self._path = str(path)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def __enter__(self) -> FakeRtnetlink:
        self._listener.bind(self._path)
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def connect(self) -> socket.socket:
        found = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        found.settimeout(5)
        found.connect(self._path)
        return found

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError):
            while raw := sock.recv(1 << 16):
                length, kind, _, sequence, _ = struct.unpack_from("=IHHII", raw)
                assert length == len(raw), "one request in a datagram"
                _, _, index, _, _ = struct.unpack_from("=BxHiII", raw, 16)
                try:
                    sock.send(self._handle(kind, sequence, index, raw[32:]))
                except OSError as err:
                    sock.send(self._error(sequence, -(err.errno or 5)))

    @staticmethod
    def _error(sequence: int, number: int) -> bytes:
        body = struct.pack("=i", number) + bytes(16)
        return struct.pack("=IHHII", 16 + len(body), 2, 0, sequence, 0) + body

    def _handle(self, kind: int, sequence: int, index: int, rest: bytes) -> bytes:
        if index not in self.interfaces:
            raise fail(errno.ENODEV)
        interface = self.interfaces[index]
        if kind == 18:
            return self.newlink(index, sequence)
        for list_type, infos in split(rest):
            assert list_type == 22, "only functions are set"
            for info_type, parts in split(infos):
                if info_type != 1:
                    raise fail(errno.EINVAL)
                for what, data in split(parts):
                    self._set(interface, what, data)
        return self._error(sequence, 0)

    @staticmethod
    def _set(interface: Interface, what: int, data: bytes) -> None:
        (number,) = struct.unpack_from("=I", data)
        if what not in interface.operations:
            raise fail(errno.EOPNOTSUPP)
        if number not in interface.ports:
            raise fail(errno.EINVAL)
        if what in interface.refuse:
            raise fail(interface.refuse[what])
        port = interface.ports[number]
        (word,) = struct.unpack_from("=I", data, 4)
        if what == 1 and data[4] & 1:
            raise fail(errno.EINVAL)
        if what == 2 and word > 4095:
            raise fail(errno.EINVAL)
        if what == 6 and not interface.link_up:
            raise fail(errno.EINVAL)
        if what == 5 and word > 2:
            raise fail(errno.EINVAL)
        interface.log.append(what)
        if what in interface.deaf:
            return
        if what == 1:
            port.mac = data[4:10]
        elif what == 6:
            port.rate = struct.unpack_from("=II", data, 4)
        elif what in (10, 11):
            assert len(data) == 16, "struct ifla_vf_guid is padded"
            (guid,) = struct.unpack_from("=Q", data, 8)
            setattr(port, "node_guid" if what == 10 else "port_guid", guid)
        else:
            setattr(port, {2: "vlan", 4: "spoofchk", 5: "state", 9: "trust"}[what], word)

    def newlink(self, index: int, sequence: int = 0) -> bytes:
        """RTM_NEWLINK of an interface, with its functions."""
        interface = self.interfaces[index]
        infos = b""
        for number, port in interface.ports.items():

            def known(what: int, value: int, has: frozenset[int] = interface.operations) -> int:
                return value if what in has else 0xFFFFFFFF

            parts = attr(1, struct.pack("=I32s", number, port.mac))
            parts += attr(2, struct.pack("=III", number, port.vlan, 0))
            parts += attr(6, struct.pack("=III", number, *port.rate))
            parts += attr(3, struct.pack("=II", number, port.rate[1]))
            parts += attr(4, struct.pack("=II", number, known(4, port.spoofchk)))
            parts += attr(5, struct.pack("=II", number, port.state))
            parts += attr(9, struct.pack("=II", number, known(9, port.trust)))
            if interface.kind == IB:
                parts += attr(10, struct.pack("=I4xQ", number, port.node_guid))
                parts += attr(11, struct.pack("=I4xQ", number, port.port_guid))
            infos += attr(1, parts)
        name = attr(3, b"ib0\0" if interface.kind == IB else b"eth0\0")
        body = struct.pack("=BxHiII", 0, interface.kind, index, 0x1003, 0) + name
        body += attr(21, struct.pack("=I", len(interface.ports))) + attr(22, infos)  # nla_nest_start_noflag
        return struct.pack("=IHHII", 16 + len(body), 16, 0, sequence, 0) + body


def attr(kind: int, data: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(data), kind) + data + bytes(-len(data) % 4)


def split(raw: bytes) -> list[tuple[int, bytes]]:
    found = []
    while raw:
        length, kind = struct.unpack_from("=HH", raw)
        assert 4 <= length <= len(raw), "attributes fill their parent exactly"
        found.append((kind & 0x3FFF, raw[4:length]))
        raw = raw[(length + 3) // 4 * 4 :]
    return found


def network(pci: FakePci, kernel: FakeRtnetlink, pf: Device, kind: int, index: int) -> Interface:
    """Give a physical function an interface with a port for each of its functions."""
    operations = IPOIB if kind == IB else IGB
    interface = Interface(kind, {n: Port() for n in range(len(pf.virtfns))}, operations)
    kernel.interfaces[index] = interface
    name = next(iter(pf.folder.folder("net").entries), "eth0")
    for attribute, text in (("type", kind), ("ifindex", index), ("flags", "0x1003")):
        pf.folder.put(f"net/{name}/{attribute}", fixed(f"{text}\n"))
    pf.folder.put("net/ib0.8001/type", fixed(f"{kind}\n"))  # a partition's, which is not the one
    pf.folder.put("net/ib0.8001/parent", fixed(f"{name}\n"))
    pf.folder.put("net/ib0.8001/ifindex", fixed(f"{index + 1000}\n"))
    return interface


def ofed(pf: Device) -> dict[int, dict[str, str]]:
    """Give a physical function MLNX_OFED's files; returns what the firmware holds, by function."""
    firmware: dict[int, dict[str, str]] = {}
    for number in range(len(pf.virtfns)):
        held = firmware[number] = {"node": "00:" * 7 + "00", "port": "00:" * 7 + "00", "policy": "Down"}

        def store(name: str, held: dict[str, str] = held) -> Callable[[str], None]:
            def guid(text: str) -> None:
                if not re.fullmatch(r"([0-9a-fA-F]{1,2}:){7}[0-9a-fA-F]{1,2}\n?", text):
                    raise fail(errno.EINVAL)
                held[name] = text.strip().lower()

            def policy(text: str) -> None:
                if text not in ("Down\n", "Up\n", "Follow\n"):
                    raise fail(errno.EINVAL)
                held[name] = text.strip()

            return policy if name == "policy" else guid

        for name in ("node", "port", "policy"):
            show = lambda name=name, held=held: f"{held[name]}\n"  # noqa: E731 - its value of now
            pf.folder.put(f"sriov/{number}/{name}", Attribute(show, store(name)))
    return firmware


class Mlx4Port:
    """Port 1 of a ConnectX-3: the physical table of keys, and what each function sees of it."""

    LENGTH = 127  # of the table that functions may see; one more is the physical port's own

    def __init__(self, pf: Device, name: str = "mlx4_0") -> None:
        self.pkeys = ["0x0000"] * self.LENGTH
        self.guids: dict[int, int] = {}
        self.mapped: dict[str, list[int]] = {}
        iov = f"infiniband/{name}/iov"
        for number in range(self.LENGTH):
            show = lambda number=number: f"{self.pkeys[number]}\n"  # noqa: E731 - its value of now
            pf.folder.put(f"{iov}/ports/1/pkeys/{number}", Attribute(show))
        for number, address in enumerate(pf.virtfns, 1):
            self.guids[number] = 0
            self.mapped[address] = [number + 40, self.LENGTH]  # what a crash may leave
            pf.folder.put(f"{iov}/{address}/ports/1/gid_idx/0", fixed(f"{number}\n"))
            pf.folder.put(f"{iov}/ports/1/admin_guids/{number}", self._guid(number))
            for virtual in (0, 1):
                pf.folder.put(f"{iov}/{address}/ports/1/pkey_idx/{virtual}", self._index(address, virtual))

    def _guid(self, number: int) -> Attribute:
        def store(text: str) -> None:
            if not re.fullmatch(r"(0x)?[0-9a-fA-F]{1,16}\n?", text):
                raise fail(errno.EINVAL)
            self.guids[number] = int(text, 16)

        return Attribute(lambda: f"{self.guids[number]:x}\n", store)

    def _index(self, address: str, virtual: int) -> Attribute:
        def show() -> str:
            index = self.mapped[address][virtual]
            return "none\n" if index >= self.LENGTH else f"{index}\n"

        def store(text: str) -> None:
            if text.lower().startswith("no"):
                self.mapped[address][virtual] = self.LENGTH
                return
            if not re.fullmatch(r"[0-9]+\n?", text) or int(text) >= self.LENGTH:
                raise fail(errno.EINVAL)
            self.mapped[address][virtual] = int(text)

        return Attribute(show, store)
