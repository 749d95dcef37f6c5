# SPDX-License-Identifier: Apache-2.0
"""The program of a keeper with a vhpcd that answers from a file, and guests that only note what is done.

    python keeper_process.py FOLDER GENERATION NODE BEGIN

``orders`` in the folder has one word, the next order; ``events`` gets a line for each call.
"""

from __future__ import annotations

import sys
import time
import types
from pathlib import Path

from vhpc_slurm.controller.checkpoint_client import CheckpointCalls
from vhpc_slurm.errors import FabricError
from vhpc_slurm.hooks import attending, keeper, keeping
from vhpc_slurm.model import Generation, KeeperOrder, KeeperReport, KeeperState, OrderKind, SavedNode
from vhpc_slurm.node.store.layout import Layout

FOLDER = Path(sys.argv[1])
HOLDS = (KeeperState.PREPARED, KeeperState.HELD, KeeperState.SAVED)


def note(event: str) -> None:
    with (FOLDER / "events").open("a") as file:
        file.write(f"{event}\n")


def answer(
    _client: CheckpointCalls, _generation: Generation, _node: str, report: KeeperReport | None, wait_s: float
) -> KeeperOrder:
    """The order in the file; WAIT takes as long as vhpcd may take."""
    note(f"asked {report.state.value if report else '-'}")
    until = time.monotonic() + wait_s
    while True:
        word = (FOLDER / "orders").read_text().strip()
        if word == "away":
            raise FabricError("vhpcd does not answer")
        if word == "hold" and (report is None or report.state not in HOLDS):
            return KeeperOrder(OrderKind.PREPARE, 5, "x")
        if word != "wait" or time.monotonic() >= until:
            return KeeperOrder(OrderKind(word), 5, "x", b"k")
        time.sleep(0.02)


class Guests:
    """Guests whose methods take as long as a file of that name exists."""

    def __init__(self, _layout: Layout, generation: Generation) -> None:
        note(f"found {generation}")

    def prepare(self, serial: int, wait_s: float) -> None:
        pass

    def hold(self, _wait_s: float) -> None:
        self._do("hold")

    def save(self, order: KeeperOrder) -> SavedNode:
        self._do(f"save {order.serial}")
        return SavedNode("n1", 1, "emulated", 1.0, ())

    def go_on(self) -> None:
        self._do("go_on")

    def end(self) -> None:
        self._do("end")

    def _do(self, event: str) -> None:
        note(event)
        while (FOLDER / event.partition(" ")[0]).exists():
            time.sleep(0.02)


def main() -> None:
    module = types.ModuleType(keeper.GUESTS)
    module.Guests = Guests  # type: ignore[attr-defined]
    sys.modules[keeper.GUESTS] = module
    CheckpointCalls.keeper = answer  # type: ignore[method-assign,assignment]
    attending.LOCK_S = 2.0
    vars(keeping).update(SAVING_ASK_S=0.5, RETRY_S=0.5, PACE_S=0.2)
    keeper.entry(*sys.argv[2:])


if __name__ == "__main__":
    main()
