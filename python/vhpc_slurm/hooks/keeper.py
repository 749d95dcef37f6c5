# SPDX-License-Identifier: Apache-2.0
"""The keeper: the process that saves the guests of a job on this node when vhpcd orders it.

Prolog starts it where checkpoints are on (``node.boot.keeper``); it lives as long as the job, and Epilog
ends it. ``keeping`` has its rules. Until the first order it imports only what asks vhpcd: most jobs are
never saved.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
from functools import partial
from typing import NoReturn, cast

from vhpc_slurm import slurm
from vhpc_slurm.config import Config
from vhpc_slurm.controller.client import ControllerClient
from vhpc_slurm.errors import VhpcError
from vhpc_slurm.hooks import common, start
from vhpc_slurm.hooks.attending import OwnProcess, alone, main
from vhpc_slurm.hooks.interrupts import Interrupts
from vhpc_slurm.hooks.keeperport import Begin, NodeGuests, Setting
from vhpc_slurm.hooks.keeping import Keeper
from vhpc_slurm.model import Generation, KeeperOrder, SavedNode
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.slurm import comments

ROLE = "keeper"
GUESTS = "vhpc_slurm.node.checkpoint.guests"


class KeeperProcess(OwnProcess):
    """This process."""

    def __init__(self, layout: Layout, generation: Generation, interrupts: Interrupts) -> None:
        super().__init__(layout, generation, interrupts)
        self._version = start.version()

    def comment(self, text: str) -> None:
        """Set the AdminComment in a thread: guests do not wait for Slurm."""
        threading.Thread(target=self._comment, args=(text,), name="comment", daemon=True).start()

    def _comment(self, text: str) -> None:
        job_id = self._generation.job_id
        try:
            port = slurm.commands(self._layout.config, slurm.HOOK_TIMEOUT_S)
            job, present = port.load_with_comment(job_id)
            if job.restarts == self._generation.restart:
                port.set_admin_comment(job_id, comments.beside(text, present))
        except Exception as err:  # the job goes on without it
            line = err.line() if isinstance(err, VhpcError) else repr(err)
            common.log.warning("AdminComment of job %d is not set: %s", job_id, line)

    def replaced(self) -> bool:
        """Whether the package was replaced since this process has started."""
        return start.mixed(self._version)

    def again(self, begin: Begin) -> NoReturn:
        """Execute the program again: pid, start time and environment stay, threads and open files do not.

        SIGTERM stays blocked until the new program can take it.
        """
        common.log.info("keeper: starts again (%s)", begin.value)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        os.execv(sys.executable, [*sys.orig_argv[:-1], begin.value])  # noqa: S606 - this program, no shell


class LateGuests:
    """The guests, whose modules are imported when they are needed first."""

    def __init__(self, layout: Layout, generation: Generation) -> None:
        self._layout, self._generation = layout, generation
        self._found: NodeGuests | None = None

    def find(self) -> None:
        """Import what holds and saves guests, and find them."""
        self._guests  # noqa: B018 - the import is the work

    def prepare(self, serial: int, wait_s: float) -> None:
        """Prepare them."""
        self._guests.prepare(serial, wait_s)

    def hold(self, wait_s: float) -> None:
        """Stop their programs."""
        self._guests.hold(wait_s)

    def save(self, order: KeeperOrder) -> SavedNode:
        """Write their state."""
        return self._guests.save(order)

    def go_on(self) -> None:
        """Let them continue."""
        self._guests.go_on()

    def end(self) -> None:
        """End them."""
        self._guests.end()

    @property
    def _guests(self) -> NodeGuests:
        if self._found is None:
            module = importlib.import_module(GUESTS)
            self._found = cast(NodeGuests, module.Guests(self._layout, self._generation))
        return self._found


def run(generation: Generation, node: str, begin: Begin, interrupts: Interrupts, config: Config) -> int:
    """Keep the guests until the job is over; only one keeper of a job does."""
    layout = Layout(config)
    setting = Setting(generation, node, float(config.checkpoint.hold_timeout_s))
    guests, process = LateGuests(layout, generation), KeeperProcess(layout, generation, interrupts)
    # not patient: what is not answered is asked again
    vhpcd = ControllerClient(config, patient=False)
    keeper = Keeper(setting, vhpcd, guests, process)
    return alone(layout, generation, ROLE, lambda: keeper.run(begin))


def entry(generation: str, node: str, begin: str) -> NoReturn:
    """Process entry point."""
    main(ROLE, partial(run, Generation.parse(generation), node, Begin(begin)))
