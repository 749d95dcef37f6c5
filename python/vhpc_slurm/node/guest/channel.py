# SPDX-License-Identifier: Apache-2.0
"""Root's control client of a guest, through the guest's vhpc-shim.

Speaks the protocol of docs/guest-protocol.md on ``root.sock``.  Every call has a
deadline.  Whose fault a silent guest is cannot be known here (an image that
does not boot is the user's, a hung QEMU the node's), so that is a ChannelError
and the caller, who knows the stage, classifies it.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from vhpc_slurm.errors import NodeError
from vhpc_slurm.model import GuestInterface
from vhpc_slurm.node.guest.answers import GuestHello, GuestInfo, GuestPorts
from vhpc_slurm.node.guest.wire import (
    ChannelError,
    ChannelRefusedError,
    ChannelSilentError,
    FrameStream,
    FrameType,
    GuestState,
    Op,
    Tag,
    fields_of,
    guest_text,
    number,
    put,
    text,
)
from vhpc_slurm.node.host.accounts import Account
from vhpc_slurm.node.host.timezone import TimeZone
from vhpc_slurm.options import Mount

__all__ = [
    "ROOT_SOCKET",
    "ChannelError",
    "ChannelRefusedError",
    "ChannelSilentError",
    "GuestChannel",
    "GuestHello",
    "GuestInfo",
    "GuestPorts",
]

VERSION_MIN = 1
VERSION_MAX = 1

_CONNECT_RETRY_S = 0.02
ROOT_SOCKET = "root.sock"
"""The shim's socket that only root can connect to: no user can keep its queue full."""
PORT_INDEX_BYTES = 4


class GuestChannel:
    """One control session with a guest's agent.

    Use as a context manager, or call close().  Not thread safe.  After a
    ChannelError other than these two the channel is of no more use:
    ChannelRefusedError, and ChannelSilentError of hello().
    """

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        self._stream = FrameStream(sock)
        self._timeout_s = timeout_s
        self._request_id = 0
        self._hello: GuestHello | None = None
        self._said_hello = False

    @classmethod
    def connect(cls, path: Path | str, timeout_s: float = 10.0) -> Self:
        """Connect to a shim's socket.

        Args:
            path: the socket; it may appear within the timeout.
            timeout_s: deadline of this call, and the default one of later calls.

        Raises:
            NodeError: the shim does not listen there; it belongs to this node.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                sock.connect(str(path))
            except (FileNotFoundError, ConnectionRefusedError, BlockingIOError) as err:
                sock.close()
                if time.monotonic() >= deadline:
                    raise NodeError(f"cannot connect to {path}", str(err), "is vhpc-shim running?") from err
                time.sleep(_CONNECT_RETRY_S)
            except OSError as err:
                sock.close()
                raise NodeError(f"cannot connect to {path}", str(err)) from err
            else:
                return cls(sock, timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Hang up; idempotent."""
        self._stream.close()

    # --- operations -----------------------------------------------------------

    def hello(self, timeout_s: float | None = None, *, wait_for_boot: bool = True) -> GuestHello:
        """Wait for the agent, which may still be booting, and return what it says of itself.

        A call that ran into its deadline may be repeated.

        Args:
            timeout_s: deadline; default is connect()'s.
            wait_for_boot: False: a guest that is still booting counts as silent at once.

        Raises:
            ChannelSilentError: silence until the deadline.
            ChannelError: the channel was closed.
        """
        if self._hello is not None:
            return self._hello
        deadline = self._deadline(timeout_s)
        if not self._said_hello:
            versions = put(Tag.VERSION_MIN, VERSION_MIN) + put(Tag.VERSION_MAX, VERSION_MAX)
            self._stream.send(FrameType.HELLO, versions, deadline)
            self._said_hello = True
        while True:
            fields = dict(
                fields_of(
                    self._stream.receive(FrameType.HELLO, deadline, "the guest's agent does not answer")
                )
            )
            low, high = number(fields, Tag.VERSION_MIN), number(fields, Tag.VERSION_MAX)
            if number(fields, Tag.STATE) == GuestState.BOOTING:
                if not wait_for_boot:
                    raise ChannelSilentError("the guest's agent does not answer", "the guest is booting")
                continue  # the shim says that the guest is booting; it says HELLO again later
            if low > VERSION_MAX or high < VERSION_MIN:
                raise ChannelError(
                    "the image's agent speaks another protocol",
                    f"it speaks versions {low} to {high}, this node {VERSION_MIN} to {VERSION_MAX}",
                    "rebuild the image",
                )
            self._hello = GuestHello(
                text(fields, Tag.AGENT_VERSION), text(fields, Tag.BOOT_ID), text(fields, Tag.KERNEL)
            )
            return self._hello

    def identity(
        self,
        hostname: str,
        account: Account | None = None,
        *,
        hosts: Sequence[str] = (),
        timezone: TimeZone | None = None,
        commands: Sequence[str] = (),
        timeout_s: float | None = None,
    ) -> None:
        """Give the guest its name and its user.

        Args:
            hostname: Slurm's node name.
            account: of the job's user, who gets a home if it does not exist, /bin/sh where the image lacks
                the shell, and sudo without password.  Groups without a name get no entry in the guest's
                group file.  None: no account.
            hosts: lines for /etc/hosts, without line ends.
            timezone: of the node; None leaves the image's.
            commands: names of commands that the guest may run on the host.
            timeout_s: deadline; default is connect()'s.

        Raises:
            ChannelRefusedError: a value the agent does not accept, or its system refused.
            ChannelError: silence, or the channel was closed.
        """
        body = [put(Tag.HOSTNAME, hostname)]
        body += [put(Tag.HOSTS_LINE, line) for line in hosts]
        if account is not None:
            body += [
                put(Tag.USER_NAME, account.name),
                put(Tag.USER_UID, account.uid),
                put(Tag.USER_GID, account.gid),
                put(Tag.USER_GECOS, account.gecos),
                put(Tag.USER_HOME, account.home),
                put(Tag.USER_SHELL, account.shell),
            ]
            body += [
                put(Tag.GROUP, struct.pack("<I", gid) + os.fsencode(group))
                for group, gid in account.groups
                if group
            ]
        if timezone is not None:
            body += [put(Tag.TIMEZONE, timezone.name), put(Tag.ZONE_DATA, timezone.data)]
        body += [put(Tag.COMMAND, command) for command in commands]
        self._call(Op.IDENTITY, b"".join(body), timeout_s)

    def mount(self, tag: str, path: str, read_only: bool = False, timeout_s: float | None = None) -> None:
        """Mount virtiofs share ``tag`` on the absolute ``path``; errors as identity()."""
        body = put(Tag.MOUNT_TAG, tag) + put(Tag.MOUNT_PATH, path) + put(Tag.READ_ONLY, int(read_only))
        self._call(Op.MOUNT, body, timeout_s)

    def disk(self, path: str, uid: int, gid: int, timeout_s: float | None = None) -> None:
        """Mount the guest's disk at the absolute ``path``, for this user; errors as identity()."""
        body = put(Tag.MOUNT_PATH, path) + put(Tag.USER_UID, uid) + put(Tag.USER_GID, gid)
        self._call(Op.DISK, body, timeout_s)

    def bind(self, mount: Mount, account: Account, timeout_s: float | None = None) -> None:
        """Mount a folder of a share at a second place, with this user's rights; errors as identity()."""
        body = [put(Tag.MOUNT_SOURCE, mount.source), put(Tag.MOUNT_PATH, mount.target)]
        body += [put(Tag.READ_ONLY, int(mount.read_only))]
        body += [put(Tag.USER_UID, account.uid), put(Tag.USER_GID, account.gid)]
        body += [put(Tag.GROUP, struct.pack("<I", gid) + b"-") for _, gid in account.groups]
        self._call(Op.BIND, b"".join(body), timeout_s)

    def environment(self, variables: Sequence[str], start_dir: str, timeout_s: float | None = None) -> None:
        """Set NAME=VALUE for programs of the guest, and where they start (or empty); errors as identity()."""
        body = [put(Tag.ENV, one) for one in variables] + ([put(Tag.CWD, start_dir)] if start_dir else [])
        self._call(Op.ENVIRONMENT, b"".join(body), timeout_s)

    def topology(self, xml: str, timeout_s: float | None = None) -> None:
        """Have programs find this file by NCCL_TOPO_FILE; errors as identity()."""
        self._call(Op.TOPOLOGY, put(Tag.TOPOLOGY, xml), timeout_s)

    def network(
        self,
        interface: GuestInterface,
        mtu: int,
        name: str,
        nodelist: Sequence[str] = (),
        timeout_s: float | None = None,
        *,
        slots: Sequence[tuple[str, int]] = (),
    ) -> None:
        """Configure the guest's interface on the network of its job.

        Args:
            interface: its MAC address and addresses.
            mtu: its MTU.
            name: that it gets in the guest.
            nodelist: hostnames of all guests of the job; empty: VHPC_NODELIST is not set.
            timeout_s: deadline; default is connect()'s.
            slots: hostname and number of CPUs of all guests of the job, for files that mpirun reads.

        Raises:
            ChannelRefusedError: as identity(); ENODEV: there is no interface with this address (yet).
            ChannelError: silence, or the channel was closed.
        """
        body = put(Tag.MAC, bytes.fromhex(interface.mac.replace(":", "")))
        body += put(Tag.INTERFACE, name) + put(Tag.MTU, mtu)
        body += put(Tag.IPV4, interface.ipv4) + put(Tag.IPV6, interface.ipv6)
        if nodelist:
            body += put(Tag.NODELIST, ",".join(nodelist))
        hosts = (put(Tag.HOST, struct.pack("<I", count) + host.encode()) for host, count in slots)
        self._call(Op.NETWORK, body + b"".join(hosts), timeout_s)

    def fabric(
        self,
        keys: Sequence[int],
        port_guids: Sequence[int],
        wait_s: float,
        address: str = "",
        timeout_s: float | None = None,
    ) -> GuestPorts:
        """Wait until the guest's InfiniBand ports are these, active, with exactly these keys.

        Args:
            keys: entries of each port's table, 16 bits with the membership; the job's own comes first.
            port_guids: of the guest's ports, in the order in which programs shall use them.
            wait_s: how long the guest may wait.
            address: ``A.B.C.D/N`` for the first port's interface with the job's key (IPoIB); empty: none.
            timeout_s: what the answer may take beyond that; default is connect()'s.

        Raises:
            ChannelRefusedError: they are not so; the text is what the guest sees.
            ChannelError: silence, or the channel was closed.
        """
        body = [put(Tag.KEY, key) for key in keys]
        body += [put(Tag.PORT_GUID, struct.pack("<Q", guid)) for guid in port_guids]
        body.append(put(Tag.WAIT_MS, int(wait_s * 1000)))
        if address:
            body.append(put(Tag.ADDRESS, address))
        limit_s = wait_s + (self._timeout_s if timeout_s is None else timeout_s)
        payload = self.ask(Op.FABRIC, b"".join(body), limit_s)
        ports = [value for tag, value in fields_of(payload) if tag == Tag.PORT]
        if any(len(value) < PORT_INDEX_BYTES for value in ports):
            raise ChannelError("the guest sent a malformed message", "PORT is too short")
        named = tuple(
            (guest_text(value[PORT_INDEX_BYTES:]), int.from_bytes(value[:PORT_INDEX_BYTES], "little"))
            for value in ports
        )
        return GuestPorts(named, text(dict(fields_of(payload)), Tag.INTERFACE))

    def ready(self, timeout_s: float | None = None) -> GuestInfo:
        """Ask whether everything asked before is done; errors as identity()."""
        return self._info(self._call(Op.READY, b"", timeout_s))

    def info(self, timeout_s: float | None = None) -> GuestInfo:
        """State of the guest now; errors as identity()."""
        return self._info(self._call(Op.INFO, b"", timeout_s))

    def ping(self, timeout_s: float | None = None) -> float:
        """Round trip to the agent in seconds; ChannelError when it does not answer."""
        deadline = self._greet(timeout_s)
        began = time.monotonic()
        self._stream.send(FrameType.PING, b"", deadline)
        self._stream.receive(FrameType.PONG, deadline, "the guest does not answer a ping")
        return time.monotonic() - began

    def poweroff(self, timeout_s: float | None = None) -> None:
        """Ask the guest to power off; wait_end() returns when it has."""
        self._request(Op.POWEROFF, b"", self._greet(timeout_s))

    def wait_end(self, timeout_s: float) -> None:
        """Wait until the guest has ended, after poweroff().

        The agent's reply may be lost with the guest, so it is not waited for:
        what tells is that the shim closes this channel.

        Raises:
            ChannelRefusedError: the agent will not power off.
            ChannelSilentError: the guest has not ended within ``timeout_s``.
        """
        deadline = time.monotonic() + timeout_s
        silence = "the guest does not power off"
        try:
            while True:
                payload = self._stream.receive(FrameType.REPLY, deadline, silence)
                self._check_reply(Op.POWEROFF, payload)
        except (ChannelRefusedError, ChannelSilentError):
            raise
        except ChannelError:
            return  # the channel is closed

    def ask(self, op: Op, body: bytes, timeout_s: float | None = None) -> bytes:
        """Send one request with these fields and return the fields of its reply; errors as identity()."""
        deadline = self._greet(timeout_s)
        self._request(op, body, deadline)
        silence = f"guest operation {op.name.lower()} got no answer"
        while True:
            payload = self._stream.receive(FrameType.REPLY, deadline, silence)
            if self._check_reply(op, payload):
                return payload

    # --- wire -----------------------------------------------------------------

    def _deadline(self, timeout_s: float | None) -> float:
        return time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)

    def _greet(self, timeout_s: float | None) -> float:
        deadline = self._deadline(timeout_s)
        if self._hello is None:
            self.hello(timeout_s)
        return deadline

    def _call(self, op: Op, body: bytes, timeout_s: float | None) -> dict[int, bytes]:
        return dict(fields_of(self.ask(op, body, timeout_s)))

    def _request(self, op: Op, body: bytes, deadline: float) -> None:
        self._request_id += 1
        head = put(Tag.OP, op) + put(Tag.REQUEST_ID, self._request_id)
        self._stream.send(FrameType.REQUEST, head + body, deadline)

    def _check_reply(self, op: Op, payload: bytes) -> bool:
        """Whether it answers the last request; False: an older one, whose deadline had passed."""
        fields = dict(fields_of(payload))
        if number(fields, Tag.REQUEST_ID) != self._request_id:
            return False
        errno = number(fields, Tag.ERRNO)
        if errno != 0:
            raise ChannelRefusedError(
                f"guest operation {op.name.lower()} failed", errno, text(fields, Tag.TEXT)
            )
        return True

    @staticmethod
    def _info(fields: dict[int, bytes]) -> GuestInfo:
        return GuestInfo(
            agent_version=text(fields, Tag.AGENT_VERSION),
            boot_id=text(fields, Tag.BOOT_ID),
            kernel=text(fields, Tag.KERNEL),
            hostname=text(fields, Tag.HOSTNAME),
            cpus=number(fields, Tag.CPUS),
            memory_kib=number(fields, Tag.MEMORY_KIB),
            sessions=number(fields, Tag.SESSIONS),
            uptime_s=number(fields, Tag.UPTIME_MS) / 1000,
            locks=number(fields, Tag.LOCKS) > 0,
        )
