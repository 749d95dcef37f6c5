# SPDX-License-Identifier: Apache-2.0
"""The user who owns the other end of a local connection, from the kernel (sock_diag(7)).

The kernel knows both sockets of a connection within one host, so this needs no
credential and no byte from the peer.
"""
# Decision: On vhpcd's own host the kernel identifies the user

from __future__ import annotations

import contextlib
import socket
import struct
from ipaddress import ip_address

NETLINK_SOCK_DIAG = 4
SOCK_DIAG_BY_FAMILY = 20
NLM_F_REQUEST = 1
NLMSG_ERROR = 2
TIMEOUT_S = 0.1
_ANY_COOKIE = 0xFFFFFFFF
_HEADER = struct.Struct("=IHHII")  # struct nlmsghdr
# struct inet_diag_req_v2: family, protocol, ext, pad, states, then struct inet_diag_sockid
_REQUEST = struct.Struct("=BBBxI")
_ID = struct.Struct("=2s2s16s16sIII")
# struct inet_diag_msg: family, state, timer, retrans, struct inet_diag_sockid, expires, queues, uid, inode
_ANSWER = struct.Struct(f"=BBBB{_ID.size}xIIIII")
_ESTABLISHED = 1


class PeerUids:
    """A netlink socket; for one thread."""

    def __init__(self) -> None:
        """OSError where the kernel has no such interface."""
        self._link = socket.socket(
            socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, NETLINK_SOCK_DIAG
        )
        self._link.settimeout(TIMEOUT_S)
        self._sequence = 0

    def of(self, peer: tuple[str, int], own: tuple[str, int]) -> int | None:
        """The uid of the TCP socket that is at ``peer`` and connected to ``own``; None: unknown."""
        try:
            family = socket.AF_INET6 if ":" in peer[0] else socket.AF_INET
            there, here = (
                ip_address(end[0].partition("%")[0]).packed.ljust(16, b"\0") for end in (peer, own)
            )
            identity = _ID.pack(
                struct.pack(">H", peer[1]),
                struct.pack(">H", own[1]),
                there,
                here,
                0,
                _ANY_COOKIE,
                _ANY_COOKIE,
            )
            return self._ask(_REQUEST.pack(family, socket.IPPROTO_TCP, 0, 0xFFFFFFFF) + identity)
        except (OSError, ValueError, struct.error):
            return None

    def _ask(self, body: bytes) -> int | None:
        self._sequence = (self._sequence + 1) & 0x7FFFFFFF
        head = _HEADER.pack(_HEADER.size + len(body), SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, self._sequence, 0)
        self._link.send(head + body)
        for _ in range(4):  # late answers to earlier questions
            answer = self._link.recv(4096)
            _, kind, _, sequence, _ = _HEADER.unpack_from(answer)
            if sequence == self._sequence:
                break
        else:
            return None
        if kind == NLMSG_ERROR or len(answer) < _HEADER.size + _ANSWER.size:
            return None
        _, state, *_, uid, inode = _ANSWER.unpack_from(answer, _HEADER.size)
        # A socket that no process has open is reported with uid 0.
        return int(uid) if state == _ESTABLISHED and inode else None

    def close(self) -> None:
        """End."""
        with contextlib.suppress(OSError):
            self._link.close()
