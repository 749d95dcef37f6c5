# SPDX-License-Identifier: Apache-2.0
"""The guests of a generation on this node: held, saved, and released or ended, all together."""

from __future__ import annotations

import contextlib
import errno
import logging
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from vhpc_slurm.errors import NodeError, VhpcError
from vhpc_slurm.model import Generation, KeeperOrder, SavedGuest, SavedNode
from vhpc_slurm.node.checkpoint import facts, fifo, folder, save
from vhpc_slurm.node.checkpoint.facts import GuestFacts
from vhpc_slurm.node.checkpoint.folder import Folder, Names
from vhpc_slurm.node.checkpoint.seal import SealKey
from vhpc_slurm.node.guest import hold, libvirtd, usage
from vhpc_slurm.node.guest.channel import ROOT_SOCKET, ChannelError, ChannelRefusedError, GuestChannel
from vhpc_slurm.node.guest.usage import AskedGuest
from vhpc_slurm.node.host import signalling
from vhpc_slurm.node.store import usage as stored_usage
from vhpc_slurm.node.store.layout import Layout

T = TypeVar("T")
log = logging.getLogger("vhpc")
CONNECT_S = 5.0
SAVE_S = 24 * 3600.0
"""Longest time for the memory of one guest; vhpcd ends the checkpoint of a job that ends."""


class Guests:
    """The guests of a generation, as the boot has written them down; they may be held already.

    Args:
        layout: of this node.
        generation: of the job.

    Raises:
        NodeError: they cannot be saved.
    """

    def __init__(self, layout: Layout, generation: Generation) -> None:
        self._layout, self._generation = layout, generation
        self._facts = facts.read(layout, generation)
        self._held_since = time.monotonic()
        self._logged: set[str] = set()

    @property
    def held(self) -> bool:
        """Whether a guest is suspended, as in ``save``, or after a keeper was killed.

        Raises:
            NodeError: libvirt does not answer.
        """
        with self._libvirt() as hypervisor:
            return any(hypervisor.suspended(guest.domain) for guest in self._facts.guests)

    def prepare(self, serial: int, wait_s: float) -> None:
        """Let nothing begin in all guests that the host takes part in; programs continue.

        If a guest cannot be prepared, none is afterwards.

        Args:
            serial: of the checkpoint.
            wait_s: how long each guest waits for what delays it.

        Raises:
            NodeError: a guest cannot be prepared; its line says why.
        """
        try:
            self._all(lambda guest: self._ask(guest, lambda channel: hold.prepare(channel, serial, wait_s)))
        except VhpcError:
            with contextlib.suppress(VhpcError):
                self.go_on()
            raise

    def hold(self, wait_s: float) -> None:
        """Stop the programs of all guests, which are prepared on all nodes of the job.

        Raises:
            NodeError: a guest cannot be held; its line says why.
        """
        self._all(lambda guest: self._ask(guest, lambda channel: hold.hold(channel, wait_s)))
        self._keep_usage()

    def save(self, order: KeeperOrder) -> SavedNode:
        """Suspend all guests, which are held on all nodes of the job, and write their state and disks.

        On an error no file of theirs is left; some may be suspended.

        Raises:
            NodeError: a guest cannot be saved; its line says why.
        """
        self._suspend()
        root = Path(self._layout.config.checkpoint.folder)
        try:
            with folder.made(root, order.serial) as place:
                guests = self._all(lambda guest: self._save(place, order, guest))
            with self._libvirt() as hypervisor:
                _, qemu = hypervisor.version()
        except VhpcError:
            with contextlib.suppress(VhpcError):
                self.remove(order.serial)
            raise
        seconds = round(time.monotonic() - self._held_since, 3)
        return SavedNode(self._facts.node, qemu, self._facts.cpu, seconds, tuple(guests))

    def _suspend(self) -> None:
        """Make the shims wait, and suspend the guests: not before all nodes have held theirs.

        Until then a task may start in a guest, whose step ends on the host before another guest is held.
        """
        self._held_since = time.monotonic()
        for guest in self._facts.guests:
            if not signalling.send(guest.shim, signal.SIGUSR1):
                raise NodeError(f"guest {guest.hostname} cannot be stopped", "its vhpc-shim has ended")
        with self._libvirt() as hypervisor:
            for guest in self._facts.guests:
                hypervisor.suspend(guest.domain)

    def go_on(self, failed: int = 0) -> None:
        """Let all guests continue that are held or prepared; those that are not stay as they are.

        Args:
            failed: a checkpoint that was given up, whose files of these guests are removed; 0: none.

        Raises:
            NodeError: a guest cannot continue, or a file cannot be removed; the others were done.
        """
        errors: list[VhpcError] = []
        with _collected(errors), self._libvirt() as hypervisor:
            for guest in self._facts.guests:
                with _collected(errors):
                    hypervisor.resume(guest.domain)
        for guest in self._facts.guests:
            signalling.send(guest.shim, signal.SIGUSR2)
        with _collected(errors):
            self._all(lambda guest: _release(self._folder(guest), guest))
        if failed:
            with _collected(errors):
                self.remove(failed)
        lines = {error.line() for error in errors[1:]}
        for line in sorted(lines - self._logged):  # the keeper tries again every few seconds
            log.warning("%s", line)
        self._logged = lines
        if errors:
            raise errors[0]

    def end(self) -> None:
        """End all guests, which are held: their checkpoint is valid. Shims stay silent until they are ended.

        Raises:
            TeardownError: libvirt cannot end one.
            NodeError: libvirt does not answer.
        """
        with contextlib.suppress(FileNotFoundError):  # an Epilog may have removed the folder
            self._layout.guests_ended(self._generation.job_id).touch(mode=0o600)
        with self._libvirt() as hypervisor:
            for guest in self._facts.guests:
                hypervisor.destroy(guest.domain)

    def remove(self, serial: int) -> None:
        """Remove the files of these guests from a checkpoint.

        Raises:
            NodeError: that is not possible.
        """
        root = Path(self._layout.config.checkpoint.folder)
        folder.remove(root, serial, tuple(guest.rank for guest in self._facts.guests))

    def _save(self, place: Folder, order: KeeperOrder, guest: GuestFacts) -> SavedGuest:
        def snapshot(path: str) -> None:
            # a connection of its own: libvirt handles only a few calls of one at the same time
            with self._libvirt() as hypervisor:
                hypervisor.save_memory(guest.domain, path, SAVE_S)

        names = Names(guest.rank)
        key = SealKey(order.key, order.serial, names.state, order.encrypt)
        state, disk = save.save_state(place, key, self._folder(guest) / fifo.NAME, snapshot), None
        if guest.disk:
            key = SealKey(order.key, order.serial, names.disk, order.encrypt)
            disk = save.save_disk(place, key, Path(guest.disk))
        size = (guest.vcpus, guest.memory_mib)
        return SavedGuest(guest.rank, guest.hostname, *size, state, disk, guest.snapshots)

    def _keep_usage(self) -> None:
        """Keep what the programs have used: guests that END ends cannot be asked any more."""
        asked = [AskedGuest(self._folder(guest), guest.daemons) for guest in self._facts.guests]
        try:
            stored_usage.keep(self._layout.usage(self._generation), usage.of_guests(asked))
        except OSError as err:
            log.warning("what %s has used is not kept: %s", self._generation, err)

    def _ask(self, guest: GuestFacts, question: Callable[[GuestChannel], None]) -> None:
        try:
            with GuestChannel.connect(self._folder(guest) / ROOT_SOCKET, CONNECT_S) as channel:
                question(channel)
        except ChannelError as err:
            raise NodeError(f"guest {guest.hostname} cannot be stopped", err.why or err.what) from err

    def _folder(self, guest: GuestFacts) -> Path:
        return self._layout.guest(self._generation.job_id, guest.index)

    def _libvirt(self) -> contextlib.AbstractContextManager[libvirtd.Hypervisor]:
        config = self._layout.config.guests
        return libvirtd.connect(config.libvirt_uri, config.stage_timeout_s)

    def _all(self, action: Callable[[GuestFacts], T]) -> list[T]:
        """Do it with all guests at the same time; raises the first error when all have ended."""
        guests = self._facts.guests
        with ThreadPoolExecutor(max(1, len(guests))) as pool:
            futures = [pool.submit(action, guest) for guest in guests]
        return [future.result() for future in futures]


@contextlib.contextmanager
def _collected(errors: list[VhpcError]) -> Iterator[None]:
    try:
        yield
    except VhpcError as err:
        errors.append(err)


def _release(run_dir: Path, guest: GuestFacts) -> None:
    try:
        with GuestChannel.connect(run_dir / ROOT_SOCKET, CONNECT_S) as channel:
            hold.release(channel)
    except ChannelRefusedError as err:
        if err.errno != errno.EINVAL:  # else it was not held
            raise NodeError(f"guest {guest.hostname} does not continue", err.why) from err
    except ChannelError as err:
        raise NodeError(f"guest {guest.hostname} does not continue", err.why or err.what) from err
