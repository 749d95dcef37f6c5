# SPDX-License-Identifier: Apache-2.0
"""The program of a follower with a vhpcd that answers from a file, and a network that only notes.

    python follower_process.py FOLDER GENERATION NODE BEGIN

``version`` in the folder has that of the cluster, ``away`` or ``over``; ``events`` gets a line per call.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from vhpc_slurm.controller.client import ControllerClient
from vhpc_slurm.errors import FabricError
from vhpc_slurm.hooks import attending, follower
from vhpc_slurm.model import Generation, Roster
from vhpc_slurm.node.resource import cluster_guests
from vhpc_slurm.node.resource.cluster_network import ClusterNetwork
from vhpc_slurm.node.store.membership import Membership

FOLDER = Path(sys.argv[1])


def note(event: str) -> None:
    with (FOLDER / "events").open("a") as file:
        file.write(f"{time.monotonic():.3f} {event}\n")


def roster(
    _client: ControllerClient,
    _generation: Generation,
    _node: str,
    applied: int,
    gone: tuple[int, ...],
    wait_s: float,
) -> Roster:
    """The version in the file; an unchanged one takes as long as vhpcd may take."""
    note(f"asked {applied} {gone}")
    until = time.monotonic() + wait_s
    while True:
        word = (FOLDER / "version").read_text()
        if word == "away":
            raise FabricError("vhpcd does not answer")
        if word == "over":
            return Roster(applied, over=True)
        if int(word) != applied or time.monotonic() >= until:
            return Roster(int(word))
        time.sleep(0.02)


def follow(_network: ClusterNetwork, known: Membership) -> None:
    note(f"network {known.version}")


def tell(*words: object) -> None:
    note(f"told {words[1]}")


def main() -> None:
    setattr(ControllerClient, "roster", roster)  # noqa: B010 - mypy refuses an assignment to a method
    setattr(ClusterNetwork, "follow", follow)  # noqa: B010 - as above
    vars(cluster_guests)["tell"] = tell
    attending.LOCK_S = 2.0
    follower.entry(*sys.argv[2:])


if __name__ == "__main__":
    main()
