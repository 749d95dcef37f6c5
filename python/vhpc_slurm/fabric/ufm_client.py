# SPDX-License-Identifier: Apache-2.0
"""NVIDIA UFM's REST interface: the few calls that partitions need, over verified HTTPS.

Endpoints and bodies are those of the UFM Enterprise REST API Guide, chapters
"PKey GUIDs Rest API" and "Access Tokens API": under ``/ufmRestV3`` a request
carries ``Authorization: Basic TOKEN``.  A key that UFM does not have is answered
by 404 or by an empty object, and an answer of 200 means that UFM has accepted a
change, not that a port has it.

Every request has a connection and a deadline of its own, follows no redirect,
and is safe to repeat.
"""

from __future__ import annotations

import http.client
import io
import os
import re
import socket
import ssl
import stat
import time
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from vhpc_slurm.errors import FabricError
from vhpc_slurm.fabric.backend import FabricRefusedError
from vhpc_slurm.fabric.fence import ALONE, FabricWriter
from vhpc_slurm.fabric.numbers import DEFAULT_PKEY
from vhpc_slurm.terminal import printable
from vhpc_slurm.undecodable import UNDECODABLE

MAX_ANSWER = 256 << 20
"""Bytes of the longest answer; a thousand keys with a thousand ports each take about 80 MB."""
GUIDS_A_REQUEST = 100
"""GUIDs of one change; a removal has them in the request line, which servers limit to 8 KiB."""
_T = TypeVar("_T")
_PREFIX = "/ufmRestV3"
_TOKEN = re.compile(rb"[!-~]{1,4096}")
_GUID = re.compile(r"(0x)?[0-9a-fA-F]{16}\Z", re.ASCII)
_PKEY = re.compile(r"0x[0-9a-fA-F]{1,4}\Z", re.ASCII)


class UfmBusyError(FabricError):
    """UFM failed for now; the request may be repeated."""


class Member(msgspec.Struct, frozen=True):
    """One port of a key, as UFM says it."""

    guid: str
    membership: str | None = None


class _UfmPartition(msgspec.Struct, frozen=True):
    guids: tuple[Member, ...] | None = None
    membership: str | None = None


class _Version(msgspec.Struct, frozen=True):
    ufm_release_version: str


class UfmSettings(msgspec.Struct, frozen=True):
    """The management keys of UFM's subnet manager, hexadecimal."""

    m_key: str = "0x0"
    sa_key: str = "0x1"
    sm_key: str = "0x1"
    m_key_per_port: bool = False


class UfmClient:
    """One UFM, or the address that its high-availability pair shares."""

    def __init__(
        self, url: str, token_file: Path, ca: str, timeout_s: float, writer: FabricWriter = ALONE
    ) -> None:
        """``ca`` is a file of certificates to trust instead of the system's; ``writer`` is this vhpcd.

        Raises:
            FabricError: the address is invalid, or the certificates cannot be read.
        """
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if (
            parts.scheme != "https"
            or not parts.hostname
            or parts.path.strip("/")
            or parts.query
            or port == -1
        ):
            raise FabricError(
                f"{url!r} is not the address of a UFM", hint="fabric.ufm_url is https://HOST[:PORT]"
            )
        self._host, self._port = parts.hostname, port or 443
        self._writer = writer
        self._token_file = token_file
        self._timeout_s = timeout_s
        self._ca = ca
        self._context()

    def version(self) -> str:
        """UFM's version: the cheapest request that needs the token."""
        return self._decode(self._ask("GET", "/app/ufm_version"), _Version).ufm_release_version

    def partitions(self) -> dict[int, dict[int, bool]]:
        """By key, by port GUID: whether it is a full member."""
        found = self._decode(self._ask("GET", "/resources/pkeys?guids_data=true"), dict[str, _UfmPartition])
        return {_pkey(key): _members(one) for key, one in found.items()}

    def settings(self) -> UfmSettings:
        """The settings of its subnet manager."""
        return self._decode(self._ask("GET", "/app/smconf"), UfmSettings)

    def default_membership(self) -> str:
        """The membership of ports in the default partition: full, limited, or empty if UFM does not say."""
        found = self._ask("GET", f"/resources/pkeys/{DEFAULT_PKEY:#x}?guids_data=true")
        return self._decode(found, _UfmPartition).membership or ""

    def add(self, pkey: int, guids: list[int], *, ipoib: bool) -> None:
        """Make ports full members of a key; UFM creates a missing key."""
        for some in _portions(guids):
            body = {
                "pkey": f"{pkey:#x}",
                "guids": [f"{guid:016x}" for guid in some],
                "membership": "full",
                "index0": True,
                "ip_over_ib": ipoib,
            }
            self._ask("POST", "/resources/pkeys/", body)

    def remove(self, pkey: int, guids: list[int]) -> None:
        """Remove ports from a key; a port that is not a member is no error."""
        for some in _portions(guids):
            names = ",".join(f"{guid:016x}" for guid in some)
            self._ask("DELETE", f"/resources/pkeys/{pkey:#x}/guids/{names}", absent_ok=True)

    def delete(self, pkey: int) -> None:
        """Delete a key without ports; a missing key is no error."""
        self._ask("DELETE", f"/resources/pkeys/{pkey:#x}", absent_ok=True)

    # --- one request ---------------------------------------------------------------

    def _ask(self, method: str, path: str, body: Any = None, *, absent_ok: bool = False) -> bytes:
        """Send a request and return what UFM answers.

        Raises:
            UfmBusyError: UFM cannot be reached, has cut the connection, is busy or broken.
            FabricRefusedError: UFM rejects this request.
            FabricError: its certificate or its answer is invalid, or it denies access.
        """
        what = f"UFM at {self._host}:{self._port}"
        headers = {
            "Authorization": f"Basic {self._token()}",
            "Accept": "application/json",
            "Connection": "close",
        }
        data = None
        if body is not None:
            headers["Content-Type"] = "application/json"
            data = msgspec.json.encode(body)
        deadline = time.monotonic() + self._timeout_s
        connection = http.client.HTTPSConnection(
            self._host, self._port, timeout=self._timeout_s, context=self._context()
        )
        connection.response_class = _bounded(deadline)
        try:
            connection.connect()
            if method != "GET":
                self._writer.check()
            connection.request(method, _PREFIX + path, data, headers)
            with connection.getresponse() as answer:
                said = answer.read(MAX_ANSWER + 1)
                status = answer.status
        except ssl.SSLCertVerificationError as err:
            raise FabricError(
                f"{what} cannot be trusted",
                err.verify_message or str(err),
                "its certificate must be of fabric.ufm_ca (or of a CA of the system) and name its host",
            ) from err
        except (OSError, http.client.HTTPException, ValueError) as err:
            raise UfmBusyError(f"{what} does not answer", str(err) or type(err).__name__) from err
        finally:
            connection.close()
        if len(said) > MAX_ANSWER:
            raise FabricError(f"{what} sends too long an answer")
        if status in (200, 201, 202, 204):
            return said
        if status == 404 and absent_ok:
            return b""
        raise _refusal(what, f"{method} {path.partition('?')[0][:80]}", status, said)

    def _decode(self, data: bytes, kind: type[_T]) -> _T:
        try:
            return msgspec.json.decode(data, type=kind)
        except UNDECODABLE as err:
            raise FabricError(
                f"UFM at {self._host}:{self._port} sent an answer that cannot be read",
                str(err),
                "check the address and the token: UFM may send its login page instead of an error",
            ) from err

    def _context(self) -> ssl.SSLContext:
        """The trusted certificates, read for each request as well: a site renews them while vhpcd runs."""
        try:
            found = ssl.create_default_context(cafile=self._ca or None)
        except OSError as err:
            what = f"cannot read the certificates in {self._ca}"
            raise FabricError(what, str(err), "see fabric.ufm_ca") from err
        found.minimum_version = ssl.TLSVersion.TLSv1_2
        return found

    def _token(self) -> str:
        """The token, read for each request: the site may change it while vhpcd runs."""
        try:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            with os.fdopen(os.open(self._token_file, flags), "rb") as opened:
                found = os.fstat(opened.fileno())
                token = opened.read(8192).strip()
        except OSError as err:
            raise FabricError(
                f"cannot read UFM's token in {self._token_file}",
                err.strerror or str(err),
                "see fabric.ufm_token_file",
            ) from err
        if not stat.S_ISREG(found.st_mode) or found.st_mode & 0o077:
            raise FabricError(
                f"{self._token_file} is readable by other users",
                "it has to be secret",
                f"chmod 600 {self._token_file}",
            )
        if not _TOKEN.fullmatch(token):
            raise FabricError(f"{self._token_file} has no token", "it must contain one word and nothing else")
        return token.decode()


def _refusal(what: str, request: str, status: int, said: bytes) -> FabricError:
    text = " ".join(said[:300].decode("utf-8", "replace").split())
    why = f"{request}: HTTP {status} {printable(text)}".strip()
    if status == 401:
        return FabricError(
            f"{what} refuses the token", why, "make a new one and put it into fabric.ufm_token_file"
        )
    if status == 403:
        return FabricError(f"{what} denies access", why, "the token's user needs the role System_Admin")
    if status in (408, 409, 423, 425, 429) or status >= 500:
        return UfmBusyError(f"{what} could not serve the request", why)
    return FabricRefusedError(f"{what} refuses", why)


def _pkey(text: str) -> int:
    if not _PKEY.match(text):
        raise FabricError("UFM sent an invalid key", repr(text[:40]))
    return int(text, 16) & 0x7FFF


def _members(one: _UfmPartition) -> dict[int, bool]:
    found = {}
    for member in one.guids or ():
        if not _GUID.match(member.guid):
            raise FabricError("UFM sent an invalid port GUID", repr(member.guid[:40]))
        found[int(member.guid, 16)] = member.membership == "full"
    return found


def _portions(guids: list[int]) -> list[list[int]]:
    return [guids[first : first + GUIDS_A_REQUEST] for first in range(0, len(guids), GUIDS_A_REQUEST)]


def _bounded(deadline: float) -> type[http.client.HTTPResponse]:
    """A response that is read until the deadline.

    The timeout of a socket restarts with each byte, so a server could block vhpcd without
    end with one byte per second.
    """

    class Raw(io.RawIOBase):
        def __init__(self, sock: socket.socket) -> None:
            self._sock = sock

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any, /) -> int:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("the answer was not complete in time")
            self._sock.settimeout(left)
            return self._sock.recv_into(buffer)

    class Response(http.client.HTTPResponse):
        def __init__(self, sock: socket.socket, *args: Any, **kwargs: Any) -> None:
            super().__init__(sock, *args, **kwargs)
            self._counted = self.fp  # while it is open, so is the socket
            self.fp = io.BufferedReader(Raw(sock))

        def close(self) -> None:
            super().close()
            self._counted.close()

    return Response
