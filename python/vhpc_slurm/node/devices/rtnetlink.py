# SPDX-License-Identifier: Apache-2.0
"""Virtual functions of a network interface, through rtnetlink, as ``ip link set DEV vf N`` does.

Only two messages are needed, so no library is used: importing pyroute2 takes
longer than configuring a guest's devices.

Sources: rtnetlink(7), include/uapi/linux/if_link.h (IFLA_VFINFO_LIST and struct ifla_vf_*),
net/core/rtnetlink.c (do_setvfinfo, rtnl_fill_vfinfo).
"""
# Decision: rtnetlink without a library

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator

from vhpc_slurm.record import Record

NLMSG_ERROR = 2
RTM_NEWLINK, RTM_GETLINK = 16, 18
REQUEST, ACK = 0x1, 0x4
NESTED = 0x3FFF  # the other bits of an attribute's type are flags
IFLA_NUM_VF, IFLA_VFINFO_LIST, IFLA_EXT_MASK = 21, 22, 29
IFLA_VF_INFO = 1
MAC, VLAN, SPOOFCHK, LINK_STATE, RATE, TRUST, NODE_GUID, PORT_GUID = 1, 2, 4, 5, 6, 9, 10, 11
FILTER_VF, FILTER_SKIP_STATS = 1, 8
AUTO, ENABLE, DISABLE = 0, 1, 2
UNKNOWN = 0xFFFFFFFF
TIMEOUT_S = 10.0
LARGEST = 1 << 20


class VfInfo(Record, frozen=True):
    """The kernel's data of a virtual function; None if the kernel does not report it.

    Attributes:
        mac: of an Ethernet function; six bytes.
        vlan: 0 for none.
        spoofchk, trust: None if the driver does not support it.
        link_state: AUTO, ENABLE or DISABLE.
        rate: smallest and largest rate in Mbit/s; 0 for no limit.
        node_guid, port_guid: of an InfiniBand function (Linux 5.5 and later).
    """

    mac: bytes = b""
    vlan: int = 0
    spoofchk: bool | None = None
    trust: bool | None = None
    link_state: int = AUTO
    rate: tuple[int, int] = (0, 0)
    node_guid: int | None = None
    port_guid: int | None = None


def set_mac(vf: int, mac: bytes) -> bytes:
    """Attribute: administratively set MAC address; zeros remove it."""
    return _attribute(MAC, struct.pack("=I32s", vf, mac))


def set_vlan(vf: int, vlan: int) -> bytes:
    """Attribute: VLAN of all traffic of the function; 0 for none."""
    return _attribute(VLAN, struct.pack("=III", vf, vlan, 0))


def set_flag(kind: int, vf: int, value: int) -> bytes:
    """Attribute SPOOFCHK, TRUST or LINK_STATE."""
    return _attribute(kind, struct.pack("=II", vf, value))


def set_rate(vf: int, smallest: int, largest: int) -> bytes:
    """Attribute: limits of the transmit rate in Mbit/s; 0 for none."""
    return _attribute(RATE, struct.pack("=III", vf, smallest, largest))


def set_guid(kind: int, vf: int, guid: int) -> bytes:
    """Attribute NODE_GUID or PORT_GUID; the structure is padded to eight bytes."""
    return _attribute(kind, struct.pack("=I4xQ", vf, guid))


def connect() -> socket.socket:
    """A socket to the kernel.

    Raises:
        OSError: it does not exist.
    """
    sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE)
    sock.settimeout(TIMEOUT_S)
    return sock


class Link:
    """A network interface whose driver has virtual functions; a context manager.

    Args:
        index: the interface's number (``/sys/class/net/DEV/ifindex``).

    Raises:
        OSError: no netlink.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self._sock = connect()
        self._sequence = 0

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *_: object) -> None:
        self._sock.close()

    def set(self, attribute: bytes) -> None:
        """Set one attribute of one function.

        Raises:
            OSError: the kernel refused (EOPNOTSUPP if the driver does not support it), or did not answer.
        """
        self._sock.send(set_request(self.index, attribute, self._next()))
        for _, kind, body in self._answers():
            if kind == NLMSG_ERROR:
                _raise(body)
                return

    def info(self, vf: int) -> VfInfo:
        """The kernel's data of one function.

        Raises:
            OSError: it refused, did not answer, or has no such function (ENODEV).
        """
        self._sock.send(get_request(self.index, self._next()))
        for _, kind, body in self._answers():
            if kind == NLMSG_ERROR:
                _raise(body)
            elif kind == RTM_NEWLINK:
                found = parse_vfs(body)
                if vf not in found:
                    raise OSError(19, f"interface {self.index} has no virtual function {vf}")
                return found[vf]
        raise AssertionError("not reached: the kernel answers or the socket times out")

    def _next(self) -> int:
        self._sequence += 1
        return self._sequence

    def _answers(self) -> Iterator[tuple[int, int, bytes]]:
        """(sequence, type, body) of each message that belongs to the last request."""
        while True:
            size = self._sock.recv_into(bytearray(1), 1, socket.MSG_PEEK | socket.MSG_TRUNC)
            raw = self._sock.recv(min(size, LARGEST))
            for kind, sequence, body in messages(raw):
                if sequence == self._sequence:
                    yield sequence, kind, body


def set_request(index: int, attribute: bytes, sequence: int) -> bytes:
    """The message that sets one attribute of one function."""
    nested = _attribute(IFLA_VFINFO_LIST, _attribute(IFLA_VF_INFO, attribute))
    return _message(RTM_NEWLINK, REQUEST | ACK, sequence, index, nested)


def get_request(index: int, sequence: int) -> bytes:
    """The message that requests all functions of an interface, without their counters."""
    mask = _attribute(IFLA_EXT_MASK, struct.pack("=I", FILTER_VF | FILTER_SKIP_STATS))
    return _message(RTM_GETLINK, REQUEST, sequence, index, mask)


def messages(raw: bytes) -> Iterator[tuple[int, int, bytes]]:
    """(type, sequence, body) of each message of a datagram; stops at the first malformed one."""
    at = 0
    while len(raw) - at >= 16:
        length, kind, _, sequence, _ = struct.unpack_from("=IHHII", raw, at)
        if not 16 <= length <= len(raw) - at:
            return
        yield kind, sequence, raw[at + 16 : at + length]
        at += length + 3 & ~3


def parse_vfs(body: bytes) -> dict[int, VfInfo]:
    """Functions of an interface by their number, from the body of RTM_NEWLINK."""
    top = dict(_attributes(body[16:]))
    found = {}
    for kind, one in _attributes(top.get(IFLA_VFINFO_LIST, b"")):
        parts = dict(_attributes(one)) if kind == IFLA_VF_INFO else {}
        if MAC in parts:
            number, mac = struct.unpack_from("=I6s", parts[MAC])
            found[number] = VfInfo(
                mac=mac,
                vlan=_word(parts, VLAN, 4) or 0,
                spoofchk=_flag(_word(parts, SPOOFCHK, 4)),
                trust=_flag(_word(parts, TRUST, 4)),
                link_state=_word(parts, LINK_STATE, 4) or AUTO,
                rate=(_word(parts, RATE, 4) or 0, _word(parts, RATE, 8) or 0),
                node_guid=_guid(parts, NODE_GUID),
                port_guid=_guid(parts, PORT_GUID),
            )
    return found


def _word(parts: dict[int, bytes], kind: int, offset: int) -> int | None:
    data = parts.get(kind, b"")
    return struct.unpack_from("=I", data, offset)[0] if len(data) >= offset + 4 else None


def _flag(value: int | None) -> bool | None:
    return None if value in (None, UNKNOWN) else bool(value)


def _guid(parts: dict[int, bytes], kind: int) -> int | None:
    data = parts.get(kind, b"")
    return struct.unpack_from("=Q", data, 8)[0] if len(data) >= 16 else None


def _attribute(kind: int, data: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(data), kind) + data + bytes(-len(data) % 4)


def _attributes(raw: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while len(raw) - at >= 4:
        length, kind = struct.unpack_from("=HH", raw, at)
        if not 4 <= length <= len(raw) - at:
            return
        yield kind & NESTED, raw[at + 4 : at + length]
        at += length + 3 & ~3


def _message(kind: int, flags: int, sequence: int, index: int, attributes: bytes) -> bytes:
    body = struct.pack("=BxHiII", 0, 0, index, 0, 0) + attributes
    return struct.pack("=IHHII", 16 + len(body), kind, flags, sequence, 0) + body


def _raise(body: bytes) -> None:
    """The error of NLMSG_ERROR; 0 is an acknowledgement."""
    (number,) = struct.unpack_from("=i", body)
    if number:
        raise OSError(-number, os.strerror(-number))
