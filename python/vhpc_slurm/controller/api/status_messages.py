# SPDX-License-Identifier: Apache-2.0
"""Parts of vhpcd's status, and what nodes report for it; ``protocol`` has all messages."""

from __future__ import annotations

from typing import Annotated

import msgspec

from vhpc_slurm.controller.wire_types import JobId, Wire

MAX_DEVICES, MAX_REASON = 64, 200
"""Devices of a node in a report, and characters of a reason."""


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


class DeviceWire(Wire, frozen=True):
    """A device in quarantine: key, class, and since when, in seconds since the epoch."""

    address: Annotated[str, msgspec.Meta(max_length=64)]
    role: Annotated[str, msgspec.Meta(max_length=16)]
    reason: Annotated[str, msgspec.Meta(max_length=MAX_REASON)]
    since: float


class ReportQuarantine(Wire, frozen=True, tag="quarantine"):
    """A node: all of its devices in quarantine."""

    node: str
    devices: Annotated[tuple[DeviceWire, ...], msgspec.Meta(max_length=MAX_DEVICES)]


class NodeQuarantine(Wire, frozen=True):
    """Devices of a node in quarantine, as it reported them last."""

    node: str
    devices: tuple[DeviceWire, ...]


class AskTrouble(Wire, frozen=True, tag="trouble"):
    """An operator or administrator of Slurm asks for alarms, quarantine and the state of the fabric."""


class Trouble(Wire, frozen=True, tag="trouble"):
    """To AskTrouble: the parts of the status that operators may see."""

    fabric: FabricState
    alarms: tuple[AlarmWire, ...]
    quarantine: tuple[NodeQuarantine, ...]


class Status(Wire, frozen=True, tag="status"):
    """To AskStatus: ``time`` in seconds since the epoch; ``leases`` counts by state.

    ``seen_at`` is the address that the request came from, ``speaks_for`` are the
    nodes that it may speak for, CONTROLLER among them, or ANY alone. ``quarantine`` has
    what nodes have reported since vhpcd began, by node, for as many as a message can have.
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
    quarantine: tuple[NodeQuarantine, ...] = ()
