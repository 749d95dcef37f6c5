# SPDX-License-Identifier: Apache-2.0
"""Messages of the protocol about clusters; ``protocol`` has all messages."""

from __future__ import annotations

from typing import Annotated

import msgspec

from vhpc_slurm.controller.wire_types import Wire
from vhpc_slurm.model import Roster

Version = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Rank = Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]


class AskRoster(Wire, frozen=True, tag="roster"):
    """A node of a member: what has changed in the cluster since version ``applied``; 0: all of it.

    The node has applied that version to its network, its firewall and its guests. ``gone`` are the ranks of
    the guests of this node that have ended.  With ``wait_s`` > 0 the answer comes when there is a change, or
    after that time.
    """

    generation: str
    node: str
    applied: Version = 0
    gone: Annotated[tuple[Rank, ...], msgspec.Meta(max_length=64)] = ()
    wait_s: float = 0.0


class RosterAnswer(Wire, frozen=True, tag="roster"):
    """To AskRoster."""

    roster: Roster
