# SPDX-License-Identifier: Apache-2.0
"""Teardown: from any state of a generation until nothing of it is left on this node."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence

from vhpc_slurm.errors import TeardownError, VhpcError
from vhpc_slurm.model import Generation
from vhpc_slurm.node.devices.quarantine import QuarantinedError, QuarantineRecord
from vhpc_slurm.node.guest import usage
from vhpc_slurm.node.guest.channel import ROOT_SOCKET, ChannelError, GuestChannel
from vhpc_slurm.node.host import process
from vhpc_slurm.node.resource import registry
from vhpc_slurm.node.resource.domain import Domain, DomainData, held_guests
from vhpc_slurm.node.resource.run_folder import RunFolder
from vhpc_slurm.node.store import usage as stored_usage
from vhpc_slurm.node.store.journal import Entry, Journal
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.node.store.timeline import Recorder

log = logging.getLogger("vhpc")
CONNECT_S = 0.1
"""To reach a shim, which answers at once; also what a guest gets when the time for all of them is over."""


def tear_down(layout: Layout, journal: Journal, recorder: Recorder) -> None:
    """Power guests off, release what the journal holds, verify, and remove the journal.

    Idempotent: an empty journal is simply removed.

    Raises:
        QuarantinedError: nothing is left but devices that are in quarantine now.
        TeardownError: something is left; its line names all of it.
    """
    held = journal.held()
    domains = [entry for entry in held if entry.kind == Domain.kind]
    if layout.guests_ended(journal.generation.job_id).exists():
        domains = []  # nothing answers; what they have used was kept before
    if domains:
        keep_usage(layout, journal.generation, held)
    if domains and layout.config.guests.poweroff_timeout_s > 0:
        with recorder.stage("power off"):
            _power_off(layout, domains)
    quarantined = _release(layout, journal, recorder, keep=())
    journal.remove()
    if quarantined:
        raise QuarantinedError(quarantined)


def release_guests(layout: Layout, journal: Journal, recorder: Recorder) -> None:
    """Release all but the run folder, whose state file the SPANK plugin still has to read."""
    quarantined = _release(layout, journal, recorder, keep=(RunFolder.kind,))
    if quarantined:
        raise QuarantinedError(quarantined)


def clear(layout: Layout, generation: Generation, node: str) -> None:
    """Tear a generation down from its journal on disk alone."""
    journal = Journal(layout.journals, generation)
    try:
        tear_down(layout, journal, Recorder(layout.timeline(generation), generation, node))
    finally:
        journal.close()


def _release(
    layout: Layout, journal: Journal, recorder: Recorder, keep: tuple[str, ...]
) -> tuple[QuarantineRecord, ...]:
    """Release; returns what was put into quarantine."""
    with recorder.stage("release"):
        failures = registry.release_all(layout, journal, keep)
        quarantined = [failure for failure in failures if isinstance(failure, QuarantinedError)]
        if len(quarantined) < len(failures):
            raise TeardownError(
                f"job {journal.generation.job_id} left {len(failures)} resources behind",
                "; ".join(failure.line() for failure in failures),
                "remove the cause, then run: vhpc reconcile",
            )
    return tuple(record for failure in quarantined for record in failure.records)


def keep_usage(layout: Layout, generation: Generation, held: Sequence[Entry]) -> None:
    """Ask the guests in the journal what their programs have used: with them the figures go.

    The teardown does not wait for accounting: after a failure only these figures are missing.
    """
    found = usage.of_guests(held_guests(layout, held))
    try:
        stored_usage.keep(layout.usage(generation), found)
    except OSError as err:
        log.warning("what %s has used is not kept: %s", generation, err)


def _power_off(layout: Layout, domains: Sequence[Entry]) -> None:
    """Ask all guests to power off, so that they write back what they hold, and wait a little for their ends.

    A guest that still boots holds nothing. One that cannot be asked, refuses, or
    takes too long is destroyed by its release.
    """
    limit_s = layout.config.guests.poweroff_timeout_s
    until = time.monotonic() + limit_s
    with contextlib.ExitStack() as opened:
        asked = []
        for domain in domains:
            folder = layout.guest_of(domain.read(DomainData).name)
            with contextlib.suppress(VhpcError):
                channel = opened.enter_context(GuestChannel.connect(folder / ROOT_SOCKET, CONNECT_S))
                left = max(CONNECT_S, until - time.monotonic())
                channel.hello(left, wait_for_boot=False)
                channel.poweroff(left)
                asked.append((folder.name, channel, domain.read(DomainData).uid))
        for guest, channel, uid in asked:
            try:
                channel.wait_end(max(CONNECT_S, until - time.monotonic()))
            except ChannelError as err:
                log.warning("%s is destroyed, as it did not end within %d s: %s", guest, limit_s, err.line())
                continue
            # A QEMU that still ends when libvirt is told to destroy it costs libvirt's pause of 0.2 s
            # (virProcessKillPainfullyDelay).
            for qemu in process.of_uid(uid):
                process.wait_gone(qemu, max(CONNECT_S, until - time.monotonic()))
