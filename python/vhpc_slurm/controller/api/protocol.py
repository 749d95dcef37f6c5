# SPDX-License-Identifier: Apache-2.0
"""The protocol between vhpcd and its clients.

One TCP connection carries one request and one answer.  Either is a frame::

    u32 BE length | munge credential (at most MAX_MESSAGE bytes)

and the credential's payload is JSON: an envelope with the protocol version and
a nonce, and in it one of the tagged structures below.  So munged
authenticates every byte that is used, together with the uid of its sender. An
answer repeats the nonce of its request, so an old answer cannot be replayed;
a request whose nonce was seen before is refused.

Leases are written as ``wire_types`` says, and lists come in pages, so that no message
nears the limit.
"""

from __future__ import annotations

import struct
from functools import cache
from typing import Annotated, Any, Literal

import msgspec

from vhpc_slurm.controller.wire_types import (
    LeaseWire,
    NodeGroup,
    NodeState,
    ReadyState,
    RecordWire,
    TimelineWire,
    Wire,
)
from vhpc_slurm.model import (
    JobRequest,
    SshKeys,
    Stage,
    TunnelKeys,
)

VERSION = 8
MAX_MESSAGE = 1 << 20
"""Longest frame in bytes; also what munged itself takes."""
PAGE_BYTES = 256 << 10
"""About how much JSON goes into one page of a list."""
TTL_S = 60
"""Time to live of credentials; how far the clocks of two hosts may differ."""
MAX_WAIT_S = 600.0
GATHER_S = 60.0
"""How long a component of a heterogeneous job with a network waits for the requests of the others."""
MAX_LINE = 4000
"""Characters of a node's error."""
HEADER = struct.Struct(">I")
CONTROLLER, ANY = "@controller", "@any"
"""In ``Status.speaks_for``; no node has such a name."""

JobId = Annotated[int, msgspec.Meta(ge=1, lt=1 << 32)]
Restarts = Annotated[int, msgspec.Meta(ge=0, lt=10**9)]
Serial = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
"""Where a page of a list begins; SQLite's integers have 64 bits."""


# --- requests -----------------------------------------------------------------


class OpenGeneration(Wire, frozen=True, tag="open"):
    """PrologSlurmctld: make the lease of this job, or return its existing one."""

    request: JobRequest
    node_groups: tuple[NodeGroup, ...] = msgspec.field(name="layouts")


class WithoutGuests(Wire, frozen=True, tag="without"):
    """PrologSlurmctld: this component of a heterogeneous job has no guests; others need not wait for it."""

    leader: JobId
    offset: Serial


class GetLease(Wire, frozen=True, tag="get"):
    """A node asks for a lease.

    With ``wait_s`` > 0 the node takes it: the answer is READY or REFUSED, if
    need be after waiting, and is remembered until the node acknowledges.  With
    0 it only looks: whatever state the lease is in.
    """

    job_id: JobId
    restart: Restarts | None
    node: str
    wait_s: float


class Ending(Wire, frozen=True, tag="ending"):
    """EpilogSlurmctld: the job's generations up to this restart count (None: all) are over."""

    job_id: JobId
    restart: Restarts | None


class Acknowledge(Wire, frozen=True, tag="acknowledge"):
    """A node: whether it holds nothing of this generation any more; if not, ``note`` says what."""

    generation: str
    node: str
    clean: bool
    note: str = ""
    stages: tuple[Stage, ...] | None = None


class ReportTimeline(Wire, frozen=True, tag="timeline"):
    """A node: its timeline of a generation."""

    timeline: TimelineWire


class ReportReady(Wire, frozen=True, tag="ready"):
    """A node: its part in the ready barrier of a job with a network.

    ``kind`` and ``line`` are the error of ``failed``.  With ``wait_s`` > 0 the answer comes when all
    nodes have passed, one has failed or the generation is over, or after that time.  ``about`` are
    nodes of which the answer says whether they have reported.
    """

    generation: str
    node: str
    state: NodeState
    kind: str = ""
    line: Annotated[str, msgspec.Meta(max_length=MAX_LINE)] = ""
    about: Annotated[tuple[str, ...], msgspec.Meta(max_length=8)] = ()
    wait_s: float = 0.0


class ListLeases(Wire, frozen=True, tag="leases"):
    """An operator or a reconciling node: leases after ``after``, oldest first."""

    after: Serial = 0
    job_id: JobId | None = None
    live: bool = False


class ListTimelines(Wire, frozen=True, tag="timelines"):
    """Timelines after ``after``, of one job or of all."""

    after: Serial = 0
    job_id: JobId | None = None


class AskStatus(Wire, frozen=True, tag="status"):
    """An operator or a check: the status of vhpcd."""


class Fence(Wire, frozen=True, tag="fence"):
    """An operator: this node is off, so no ended generation still runs there."""

    node: str


class ClearKey(Wire, frozen=True, tag="clear"):
    """An operator: remove these tombstones if no port has their keys."""

    generations: tuple[str, ...]


class TellFabric(Wire, frozen=True, tag="tell"):
    """An operator: configure the fabric again; ``force`` as in NetworkBackend.apply."""

    force: bool = False


Request = (
    OpenGeneration
    | WithoutGuests
    | GetLease
    | Ending
    | Acknowledge
    | ReportTimeline
    | ReportReady
    | ListLeases
    | ListTimelines
    | AskStatus
    | Fence
    | ClearKey
    | TellFabric
)

# --- answers ------------------------------------------------------------------


class LeaseAnswer(Wire, frozen=True, tag="lease", omit_defaults=True):
    """To OpenGeneration and GetLease; ``ssh`` and ``tunnel`` are secret, for a node that takes the lease.

    A node of an earlier version refuses an answer with ``tunnel``, and so never makes the
    segment without encryption; one without it the node reads as before.
    """

    lease: LeaseWire
    ssh: SshKeys | None = None
    tunnel: TunnelKeys | None = None


class Done(Wire, frozen=True, tag="done"):
    """The change is durable."""


class LeasePage(Wire, frozen=True, tag="leases"):
    """To ListLeases; ``more`` is the next ``after``, None at the end."""

    records: tuple[RecordWire, ...]
    more: int | None


class TimelinePage(Wire, frozen=True, tag="timelines"):
    """To ListTimelines."""

    timelines: tuple[TimelineWire, ...]
    more: int | None


class FabricState(Wire, frozen=True):
    """Whether the fabric keeps jobs apart.

    Attributes:
        safe: False when it has been open, or could not be read, for longer than the site allows:
            guests with keys must end.
        open_since: since when it has been open, or a part of it could not be read, in seconds since the
            epoch; None while all of it is seen to be closed.
        what: the first finding of the auditor, or why it cannot look; empty when all is well.
        audited: when it was last seen to be as it should be; None: not since vhpcd began.
        lost: generations whose ports have lacked their key for longer than the site allows, each with
            what was seen: their guests must end.
    """

    safe: bool = True
    open_since: float | None = None
    what: str = ""
    audited: float | None = None
    lost: tuple[tuple[str, str], ...] = ()


class AlarmWire(Wire, frozen=True):
    """A problem of a job on a healthy node; ``time`` in seconds since the epoch."""

    job_id: JobId
    node: str
    time: float
    what: str


class Status(Wire, frozen=True, tag="status"):
    """To AskStatus: ``time`` in seconds since the epoch; ``leases`` counts by state.

    ``seen_at`` is the address that the request came from, ``speaks_for`` are the
    nodes that it may speak for, CONTROLLER among them, or ANY alone.
    """

    version: str
    protocol: int
    time: float
    uptime_s: float
    database: str
    leases: dict[str, int]
    connections: int
    fabric: FabricState = FabricState()
    alarms: tuple[AlarmWire, ...] = ()
    seen_at: str = ""
    speaks_for: tuple[str, ...] = ()


class Fenced(Wire, frozen=True, tag="fenced"):
    """To Fence: generations that no longer wait for the node, and those whose jobs still use it."""

    generations: tuple[str, ...]
    in_use: tuple[str, ...]


class Failure(Wire, frozen=True, tag="failure"):
    """A VhpcError; ``kind`` as in errors.py."""

    kind: str
    what: str
    why: str = ""
    hint: str = ""


Answer = LeaseAnswer | Done | ReadyState | LeasePage | TimelinePage | Status | Fenced | Failure


# --- envelopes ----------------------------------------------------------------


class Envelope(msgspec.Struct, frozen=True):
    """The outermost layer, and the only one that all protocol versions share."""

    message: Literal["request", "answer"]
    version: int
    nonce: str
    body: msgspec.Raw


def wrap(message: Literal["request", "answer"], nonce: str, body: Request | Answer) -> bytes:
    """The JSON of a message of this version."""
    raw = msgspec.Raw(msgspec.json.encode(body))
    return msgspec.json.encode(Envelope(message, VERSION, nonce, raw))


def unwrap(payload: bytes, message: Literal["request", "answer"]) -> Envelope:
    """Read the outermost layer.

    Raises:
        ValueError: it is not an envelope, not of the kind ``message``, or its nonce is invalid.
    """
    envelope: Envelope = _decode(Envelope, payload)
    if envelope.message != message:
        raise ValueError(f"{envelope.message} where {message} is expected")
    if not 16 <= len(envelope.nonce) <= 64:
        raise ValueError("odd nonce")
    return envelope


def read_request(envelope: Envelope) -> Request:
    """Decode a request; ValueError when it is not one of this version."""
    request: Request = _decode(Request, envelope.body)
    return request


def read_answer(envelope: Envelope) -> Answer:
    """Decode an answer; ValueError when it is not one of this version."""
    answer: Answer = _decode(Answer, envelope.body)
    return answer


def _decode(kind: Any, raw: bytes | msgspec.Raw) -> Any:
    try:
        return _decoder(kind).decode(raw)
    except RecursionError as err:
        raise ValueError("nested too deeply") from err


@cache
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)
