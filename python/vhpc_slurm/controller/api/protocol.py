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

Hosts are upgraded one after another: a request of any version from OLDEST is answered in its own
version; a client that an older vhpcd refuses asks again in the version of the refusal's envelope.
``versions`` says what a change of the messages needs.
"""

from __future__ import annotations

import struct
from functools import cache
from typing import Annotated, Any, Literal

import msgspec

from vhpc_slurm.controller.api import checkpoint_messages, cluster_messages, operator_messages, versions
from vhpc_slurm.controller.api.status_messages import AskTrouble, ReportQuarantine, Status, Trouble
from vhpc_slurm.controller.api.usage_messages import (
    AskUsage,
    ReportUsage,
    ReportUsageSoFar,
    UsageKept,
    UsagePage,
    UsedWire,
)
from vhpc_slurm.controller.wire_types import (
    JobId,
    LeaseWire,
    NodeGroup,
    NodeState,
    ProgressWire,
    ReadyState,
    RecordWire,
    Serial,
    TimelineWire,
    Uid,
    Wire,
)
from vhpc_slurm.model import JobRequest, NodeReport, Resume, SshKeys, Stage, TunnelKeys

VERSION, OLDEST, readable = versions.VERSION, versions.OLDEST, versions.readable
MAX_MESSAGE = 1 << 20
"""Longest frame in bytes; also what munged itself takes."""
TTL_S = 60
"""Time to live of credentials; how far the clocks of two hosts may differ."""
MAX_WAIT_S = 600.0
GATHER_S = 60.0
"""How long a component of a heterogeneous job with a network waits for the requests of the others."""
MAX_LINE = 4000
"""Characters of a node's error."""
HEADER = struct.Struct(">I")
AGAIN = "again"
"""Kind of a failure of one of several vhpcd: another one may serve the request, or this one later."""
UNUSABLE = "unusable"
"""Kind of a failure: vhpcd can never use this request."""
CONTROLLER, ANY = "@controller", "@any"
"""In ``Status.speaks_for``; no node has such a name."""

Waiter = Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{32})?$")]
Restarts = Annotated[int, msgspec.Meta(ge=0, lt=10**9)]


# --- requests -----------------------------------------------------------------


class OpenGeneration(Wire, frozen=True, tag="open"):
    """PrologSlurmctld: make the lease of this job, or return its existing one.

    ``waiter`` is the word of a command that waits for the job on a terminal, if there is one.
    """

    request: JobRequest
    node_groups: tuple[NodeGroup, ...] = msgspec.field(name="layouts")
    waiter: Waiter = ""


class WithoutGuests(Wire, frozen=True, tag="without"):
    """PrologSlurmctld: this component of a heterogeneous job has no guests; others need not wait for it."""

    leader: JobId
    offset: Serial


class GetLease(Wire, frozen=True, tag="get"):
    """A node asks for a lease.

    With ``wait_s`` > 0 the node takes it: the answer is READY or REFUSED, if
    need be after waiting, and is remembered until the node acknowledges.  With
    0 it only looks: whatever state the lease is in; with ``brief`` without what grows
    with the job's nodes (see ``LeaseWire.brief``).  ``stage`` is what it has been
    doing for ``stage_s`` seconds.
    """

    job_id: JobId
    restart: Restarts | None
    node: str
    wait_s: float
    stage: Annotated[str, msgspec.Meta(max_length=40)] = ""
    stage_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    brief: bool = False


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


class Together(Wire, frozen=True, tag="together"):
    """A node's hook: requests that one credential authenticates; each is judged and answered by itself."""

    requests: Annotated[tuple[ReportUsage | Acknowledge, ...], msgspec.Meta(min_length=1, max_length=16)]


class ReportTimeline(Wire, frozen=True, tag="timeline"):
    """A node: its timeline of a generation, and at the end of Prolog what its owner may want to know."""

    timeline: TimelineWire
    report: NodeReport | None = None


class ReportReady(Wire, frozen=True, tag="ready"):
    """A node: its part in the ready barrier of a job with a network.

    ``kind`` and ``line`` are the error of ``failed``.  With ``wait_s`` > 0 the answer comes when all
    nodes have passed, one has failed or the generation is over, or after that time.  For the nodes
    ``about`` the answer says whether they have reported.
    """

    generation: str
    node: str
    state: NodeState
    kind: str = ""
    line: Annotated[str, msgspec.Meta(max_length=MAX_LINE)] = ""
    about: Annotated[tuple[str, ...], msgspec.Meta(max_length=8)] = ()
    wait_s: float = 0.0


class ListLeases(Wire, frozen=True, tag="leases", omit_defaults=True):
    """Leases after ``after``, oldest first; with ``before`` one page of earlier ones, newest first.

    ``waiter`` is another name of a job; ``progress`` asks how far jobs that boot are, ``usage`` what
    ended ones have used, with ``so_far`` also running ones until now.
    """

    after: Serial = 0
    job_id: JobId | None = None
    live: bool = False
    waiter: Waiter = ""
    progress: bool = False
    before: Serial | None = None
    usage: bool = False
    so_far: bool = False


class ListTimelines(Wire, frozen=True, tag="timelines"):
    """Timelines after ``after``, of one job or of all."""

    after: Serial = 0
    job_id: JobId | None = None


class ListReports(Wire, frozen=True, tag="reports"):
    """Reports of a job's nodes after ``after``."""

    job_id: JobId
    after: Serial = 0


class AskStatus(Wire, frozen=True, tag="status"):
    """An operator or a check: the status of vhpcd."""


Fence = operator_messages.Fence
Fenced = operator_messages.Fenced
ClearKey = operator_messages.ClearKey
TellFabric = operator_messages.TellFabric
OfUsers = (
    ListLeases | ListTimelines | ListReports | AskUsage | AskTrouble | checkpoint_messages.ListCheckpoints
)
"""Requests that ordinary users may send: the answers have what they may see.  AskTrouble is for operators."""


class AsUser(Wire, frozen=True, tag="as-user"):
    """A web server that has authenticated a user: what vhpcd would answer to ``uid``; it only reads.

    Root, SlurmUser and ``controller.web_user`` may send it.
    """

    uid: Uid
    request: OfUsers | cluster_messages.ClusterLists


Request = (
    OpenGeneration
    | WithoutGuests
    | GetLease
    | Ending
    | Acknowledge
    | Together
    | ReportTimeline
    | ReportUsage
    | ReportUsageSoFar
    | AskUsage
    | ReportReady
    | ReportQuarantine
    | ListLeases
    | ListTimelines
    | ListReports
    | AskStatus
    | AskTrouble
    | checkpoint_messages.OfCheckpoints
    | checkpoint_messages.ListCheckpoints
    | cluster_messages.OfClusters
    | AsUser
    | Fence
    | ClearKey
    | TellFabric
)

# --- answers ------------------------------------------------------------------


class LeaseAnswer(Wire, frozen=True, tag="lease", omit_defaults=True):
    """To OpenGeneration and GetLease; all but ``lease`` is secret, for a node that takes the lease.

    ``resume`` is that of the lease, with its key and the node's own guests.
    """

    lease: LeaseWire
    ssh: SshKeys | None = None
    tunnel: TunnelKeys | None = None
    resume: Resume | None = None


class Done(Wire, frozen=True, tag="done"):
    """The change is durable."""


class LeasePage(Wire, frozen=True, tag="leases"):
    """To ListLeases; ``more`` is the next ``after``, None at the end."""

    records: tuple[RecordWire, ...]
    more: int | None
    progress: tuple[ProgressWire, ...] = ()
    used: tuple[UsedWire, ...] = ()


class TimelinePage(Wire, frozen=True, tag="timelines"):
    """To ListTimelines."""

    timelines: tuple[TimelineWire, ...]
    more: int | None


class ReportPage(Wire, frozen=True, tag="reports"):
    """To ListReports."""

    reports: tuple[NodeReport, ...]
    more: int | None


class Failure(Wire, frozen=True, tag="failure"):
    """A VhpcError; ``kind`` as in errors.py."""

    kind: str
    what: str
    why: str = ""
    hint: str = ""


class Answers(Wire, frozen=True, tag="answers"):
    """To Together, in the order of its requests."""

    answers: tuple[Done | UsageKept | Failure, ...]


Answer = (
    LeaseAnswer
    | Answers
    | Done
    | ReadyState
    | LeasePage
    | TimelinePage
    | ReportPage
    | UsageKept
    | UsagePage
    | Status
    | Trouble
    | Fenced
    | checkpoint_messages.AboutCheckpoints
    | checkpoint_messages.CheckpointPage
    | cluster_messages.AboutClusters
    | Failure
)


# --- envelopes ----------------------------------------------------------------


class Envelope(msgspec.Struct, frozen=True, omit_defaults=True):
    """The outermost layer, and the only one that all protocol versions share.

    ``epoch`` is that of the active vhpcd, where there are several; in an answer.
    """

    message: Literal["request", "answer"]
    version: int
    nonce: str
    body: msgspec.Raw
    epoch: int = 0


def wrap(
    message: Literal["request", "answer"],
    nonce: str,
    body: Request | Answer,
    version: int | None = None,
    epoch: int = 0,
) -> bytes:
    """The JSON of a message of a version (None: VERSION).

    Raises:
        FabricError: the message has what a peer of this earlier version must not ignore.
    """
    raw, version = msgspec.json.encode(body), VERSION if version is None else version
    if version < VERSION:
        raw = versions.rewrite(raw, version)
    return msgspec.json.encode(Envelope(message, version, nonce, msgspec.Raw(raw), epoch))


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
    except msgspec.MsgspecError as err:  # no ValueError before msgspec 0.20
        raise ValueError(str(err)) from err


def preload() -> None:
    """Make the decoders of answers now, for processes that fork later."""
    _decoder(Envelope)
    _decoder(Answer)


@cache
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)
