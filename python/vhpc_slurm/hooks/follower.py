# SPDX-License-Identifier: Apache-2.0
"""The follower: the process that tells a node's network and guests who joins and leaves a job's cluster.

Prolog starts it in jobs of a cluster (``node.boot.follower``); it lives as long as the job, and Epilog
ends it. ``following`` has its rules.
"""
# Decision: A follower per member and node

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import NoReturn

from vhpc_slurm.config import Config
from vhpc_slurm.controller.client import ControllerClient
from vhpc_slurm.hooks import common
from vhpc_slurm.hooks.attending import OwnProcess, alone, main
from vhpc_slurm.hooks.followerport import Setting
from vhpc_slurm.hooks.following import Follower
from vhpc_slurm.hooks.interrupts import Interrupts
from vhpc_slurm.model import Generation, Roster
from vhpc_slurm.node.host import threads
from vhpc_slurm.node.resource.cluster_guests import ClusterGuests
from vhpc_slurm.node.resource.cluster_network import ClusterNetwork
from vhpc_slurm.node.store import membership, statefile
from vhpc_slurm.node.store.layout import Layout

ROLE = "follower"
FIRST = "first"
"""Of the words in ``node.boot.follower``: no earlier follower of the job has changed anything."""


class FollowerProcess(OwnProcess):
    """This process."""

    def briefly(self, question: Callable[[], Roster], seconds: float) -> None:
        """Ask in a thread, and wait so long for it."""
        with contextlib.suppress(Exception):  # vhpcd learns it from Epilog's acknowledgement too
            threads.within(seconds, "leave", question)

    def job_ends(self) -> bool:
        """Also if the Prolog has written that the job fails: it ends the guests then."""
        if super().job_ends():
            return True
        state = statefile.read_state(self._layout.state_file(self._generation.job_id))
        return state.get("status") == "failed"


def run(generation: Generation, node: str, begin: str, interrupts: Interrupts, config: Config) -> int:
    """Follow the cluster until the job is over; only one follower of a job does."""
    layout = Layout(config)

    def work() -> bool:
        known = membership.read(layout, generation.job_id)
        if known is None:
            common.log.error("follower: the job is in no cluster")
            return True
        guests = ClusterGuests(layout, generation, known.own, node)
        guests.watch(interrupts.wake)
        network = ClusterNetwork(layout, generation, fresh=begin == FIRST)
        process = FollowerProcess(layout, generation, interrupts)
        # not patient: what is not answered is asked again
        vhpcd = ControllerClient(config, patient=False)
        return Follower(Setting(generation, node), known, vhpcd, network, guests, process).run()

    return alone(layout, generation, ROLE, work)


def entry(generation: str, node: str, begin: str) -> NoReturn:
    """Process entry point."""
    main(ROLE, partial(run, Generation.parse(generation), node, begin))
