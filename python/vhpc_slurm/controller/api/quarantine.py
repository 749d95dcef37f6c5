# SPDX-License-Identifier: Apache-2.0
"""Devices in quarantine, as nodes report them; belongs to the event loop.

They are in memory only: a node keeps the records, and reports them in each health check.
"""

from __future__ import annotations

from vhpc_slurm.controller.api.status_messages import NodeQuarantine, ReportQuarantine

MAX_SHOWN = 200
"""Devices in a status."""


class Quarantine:
    """The last report of each node that has devices in quarantine."""

    def __init__(self) -> None:
        self._reported: dict[str, NodeQuarantine] = {}

    def report(self, request: ReportQuarantine) -> None:
        """Keep what a node reports, in place of its earlier report."""
        if request.devices:
            self._reported[request.node] = NodeQuarantine(node=request.node, devices=request.devices)
        else:
            self._reported.pop(request.node, None)

    def count(self) -> int:
        """How many devices there are in all reports; any thread may ask."""
        return sum(len(one.devices) for one in list(self._reported.values()))

    def shown(self) -> tuple[NodeQuarantine, ...]:
        """The reports by node, as many as have MAX_SHOWN devices; at least one."""
        found: list[NodeQuarantine] = []
        room = MAX_SHOWN
        for _, one in sorted(self._reported.items()):
            if found and len(one.devices) > room:
                break
            found.append(one)
            room -= len(one.devices)
        return tuple(found)
