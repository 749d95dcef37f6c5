# SPDX-License-Identifier: Apache-2.0
"""The state of vhpcd at one moment, as numbers: leases, keys, VNIs, the fabric, queues."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from vhpc_slurm.controller.assembly import Assembly
from vhpc_slurm.controller.leases.layer import LeaseLayer
from vhpc_slurm.controller.store.writer import Writer
from vhpc_slurm.controller.sync.isolation import IsolationState
from vhpc_slurm.fabric.keys import KeyState
from vhpc_slurm.model import LeaseState

READ_S = 5.0
"""Longest wait for the database thread, in seconds."""


@dataclass(frozen=True)
class ControllerState:
    """Numbers of one moment.

    Attributes:
        leases: leases by state.
        refusals: leases refused since vhpcd began, by cause.
        keys: partition keys or VLANs that are not free, by state.
        segments: VNIs that are not free: held or quarantine.
        fabric: what audits have shown.
        waiting: calls that wait for the database thread, and generations that wait for the fabric.
        quarantine: devices in quarantine, as nodes have reported them.
        drained: nodes that vhpc has drained; None: Slurm has not told.
    """

    leases: Mapping[str, int]
    refusals: Mapping[str, int]
    keys: Mapping[str, int]
    segments: Mapping[str, int]
    fabric: IsolationState
    waiting: Mapping[str, int]
    quarantine: int
    drained: int | None


class StateReader:
    """Reads the state from any thread."""

    def __init__(self, leases: LeaseLayer, writer: Writer, vhpcd: Assembly) -> None:
        """``writer`` is the database thread of ``leases``, and both are those of ``vhpcd``."""
        self._leases = leases
        self._writer = writer
        self._vhpcd = vhpcd

    def read(self) -> ControllerState:
        """The state now.

        Raises:
            TimeoutError: the database thread is busy.
            FabricError: the database cannot be read.
        """
        waiting = {"database": self._writer.waiting, "fabric": self._vhpcd.scheduler.waiting}
        counts, keys, segments, refusals = self._writer.submit(self._read).result(READ_S)
        return ControllerState(
            leases={state.value: counts.get(state.value, 0) for state in LeaseState},
            refusals=refusals,
            keys={state.value: keys[state.value] for state in KeyState},
            segments={state: segments[state] for state in ("held", "quarantine")},
            fabric=self._vhpcd.audit.watch.state(),
            waiting=waiting,
            quarantine=self._vhpcd.requests.quarantine.count(),
            drained=self._vhpcd.reconciler.drained,
        )

    def _read(self) -> tuple[dict[str, int], Counter[str], Counter[str], dict[str, int]]:
        store = self._leases.store
        keys = Counter(one.state.value for one in store.keys.snapshot().assignments)
        segments = Counter("held" if one.left_s is None else "quarantine" for one in store.segments.held())
        return store.counts(), keys, segments, dict(self._leases.opening.refusals)
