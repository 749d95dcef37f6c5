"""From whatever state a generation is in to nothing left of it on this node."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from vhpc_slurm.errors import TeardownError, VhpcError
from vhpc_slurm.model import Generation
from vhpc_slurm.node import process, resources
from vhpc_slurm.node.channel import ChannelError, GuestChannel
from vhpc_slurm.node.journal import Journal
from vhpc_slurm.node.layout import Layout
from vhpc_slurm.node.quarantine import QuarantinedError, Record
from vhpc_slurm.node.timeline import Recorder


def tear_down(layout: Layout, journal: Journal, recorder: Recorder) -> None:
    """Power guests off, release what the journal holds, verify, and remove the journal.

    Idempotent: an empty journal is simply removed.

    Raises:
        QuarantinedError: nothing is left but devices that are in quarantine now.
        TeardownError: something is left; its line names all of it.
    """
    guests = {
        layout.guest_of(e.data["name"]): int(e.data["uid"])
        for e in journal.held()
        if e.kind == resources.DOMAIN
    }
    if guests and layout.config.guests.poweroff_timeout_s > 0:
        with recorder.stage("power off"):
            _power_off(layout, guests)
    doubts = _release(layout, journal, recorder, keep=())
    journal.remove()
    if doubts:
        raise QuarantinedError(doubts)


def release_guests(layout: Layout, journal: Journal, recorder: Recorder) -> None:
    """Release all but the run folder, whose state file the SPANK plugin still has to read."""
    doubts = _release(layout, journal, recorder, keep=(resources.RUN_DIR,))
    if doubts:
        raise QuarantinedError(doubts)


def clear(layout: Layout, generation: Generation, node: str) -> None:
    """Tear a generation down from its journal on disk alone."""
    journal = Journal(layout.journals, generation)
    try:
        tear_down(layout, journal, Recorder(layout.timeline(generation), generation, node))
    finally:
        journal.close()


def _release(
    layout: Layout, journal: Journal, recorder: Recorder, keep: tuple[str, ...]
) -> tuple[Record, ...]:
    """Release; returns what was put into quarantine."""
    with recorder.stage("release"):
        failures = resources.release_all(layout, journal, keep)
        doubts = [failure for failure in failures if isinstance(failure, QuarantinedError)]
        if len(doubts) < len(failures):
            raise TeardownError(
                f"job {journal.generation.job_id} left {len(failures)} things behind",
                "; ".join(failure.line() for failure in failures),
                "mend the cause, then: vhpc reconcile",
            )
    return tuple(record for doubt in doubts for record in doubt.records)


def _power_off(layout: Layout, guests: dict[Path, int]) -> None:
    """Ask guests to power off, so that they write back what they hold, and wait a little.

    A guest that cannot be asked, or takes too long, is destroyed by its release.
    """
    until = time.monotonic() + layout.config.guests.poweroff_timeout_s
    asked = []
    for folder, uid in guests.items():
        left = max(0.1, until - time.monotonic())
        with (
            contextlib.suppress(VhpcError, ChannelError),
            GuestChannel.connect(folder / "run.sock", 0.1) as channel,
        ):
            channel.poweroff(timeout_s=left)
            asked.append(uid)
    while any(True for uid in asked for _ in process.of_uid(uid)) and time.monotonic() < until:
        time.sleep(0.05)
