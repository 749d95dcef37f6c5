# SPDX-License-Identifier: Apache-2.0
"""Messages between the nodes of a lease.

A connection is for one blob. The asker sends one message, the asked node one message back, each::

    u32 BE length | munge credential that only root can decode (at most MESSAGE_MAX bytes)

with JSON in the credential, ``Ask`` and ``Reply``. Then the asked node sends the blob's bytes from
``Ask.start`` on, as frames: u32 BE length, and so many bytes of the blob. The length WAIT has no bytes
and says that the node lives and has nothing new yet; GONE says that it will not have the rest.
Bytes are not encrypted; the receiver checks them against the manifest.
"""

from __future__ import annotations

import struct
from typing import Annotated, Protocol, TypeVar

import msgspec

from vhpc_slurm.errors import FabricError
from vhpc_slurm.munge import Credential
from vhpc_slurm.undecodable import UNDECODABLE

VERSION = 1
MESSAGE_MAX = 8192
FRAME_MAX = 1 << 18
WAIT, GONE = 0, 0xFFFFFFFF
NOT_OFFERED = "no such blob is offered"
"""In ``Reply.problem``."""
HEADER = struct.Struct(">I")
TTL_S = 60
"""Time to live of credentials, in seconds; how far the clocks of two nodes may differ."""

Text = Annotated[str, msgspec.Meta(max_length=256)]
_Message = TypeVar("_Message", "Ask", "Reply")


class PeerError(Exception):
    """A node does not serve a blob, or not to this asker; the text is one line."""


class NotOfferedError(PeerError):
    """A node serves other blobs of the image, and will not have this one."""


class Seal(Protocol):
    """Makes and checks credentials: ``munge.Munge``."""

    def encode(self, payload: bytes, *, ttl_s: int = 0, only_uid: int | None = None) -> bytes:
        """A credential."""

    def decode(self, credential: bytes) -> Credential:
        """Its content."""


class Ask(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="ask"):
    """Asks for a blob.

    ``asker`` and ``asked`` are names of nodes in Slurm; ``nonce`` is new for each request. ``start`` is
    the number of the first byte wanted.
    """

    version: int
    nonce: Text
    generation: Text
    asker: Text
    asked: Text
    sha256: Text
    start: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class Reply(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="reply"):
    """Answers with the request's nonce: ``has`` bytes are there now, or ``problem`` says why none come."""

    nonce: Text
    has: int = 0
    problem: Text = ""


def seal(by: Seal, message: Ask | Reply) -> bytes:
    """A message with its length, as it is sent.

    Raises:
        PeerError: munged does not make a credential.
    """
    try:
        sealed = by.encode(msgspec.json.encode(message), ttl_s=TTL_S, only_uid=0)
    except FabricError as err:
        raise PeerError(err.line()) from err
    return HEADER.pack(len(sealed)) + sealed


def unseal(by: Seal, sealed: bytes, kind: type[_Message]) -> _Message:
    """The message of a credential.

    Raises:
        PeerError: root has not made it, or it is not such a message.
    """
    try:
        found = by.decode(sealed)
    except FabricError as err:
        raise PeerError(err.line()) from err
    if found.uid != 0:
        raise PeerError(f"uid {found.uid} sent it, not root")
    try:
        return msgspec.json.decode(found.payload, type=kind)
    except UNDECODABLE as err:
        raise PeerError(f"it cannot be read: {err}"[:200]) from err
