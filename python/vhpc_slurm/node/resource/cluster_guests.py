# SPDX-License-Identifier: Apache-2.0
"""The guests of a cluster's member on this node: when they end, and what they are told of the others."""

from __future__ import annotations

import errno
import logging
import os
import select
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from vhpc_slurm.errors import VhpcError
from vhpc_slurm.model import ClusterMember, Generation
from vhpc_slurm.node.guest.channel import ROOT_SOCKET, ChannelRefusedError, GuestChannel
from vhpc_slurm.node.guest.cluster import ClusterGuest, tell
from vhpc_slurm.node.host import process
from vhpc_slurm.node.network import plan
from vhpc_slurm.node.network.cluster import living
from vhpc_slurm.node.resource.domain import Domain, DomainData
from vhpc_slurm.node.resource.process import Process, ProcessData
from vhpc_slurm.node.store import journal
from vhpc_slurm.node.store.journal import Entry
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.node.store.membership import Membership
from vhpc_slurm.record import Record

log = logging.getLogger("vhpc")
CONNECT_S = 1.0
TELL_S = 5.0
"""All guests of a node have so long together; the other members wait no longer for them."""


class OwnGuest(Record, frozen=True):
    """A guest of this node: its rank in the job, its name, its run folder, and its QEMU."""

    rank: int
    hostname: str
    folder: Path
    qemu: tuple[process.ProcessRef, ...]


class _State(NamedTuple):
    """The arguments of ``tell`` in their order."""

    name: str
    own_job: int
    guests: tuple[ClusterGuest, ...]
    host_publics: tuple[str, ...]
    user_publics: tuple[str, ...]
    uid: int


class ClusterGuests:
    """The guests of a job on this node, from its journal."""

    def __init__(self, layout: Layout, generation: Generation, own: ClusterMember, node: str) -> None:
        held = journal.read_entries(layout.journals, generation)
        self._guests = {guest.rank: guest for guest in _own_guests(layout, held, own, node)}
        self._gone: list[int] = []
        self._told: dict[int, _State] = {}
        self._silent: set[int] = set()

    def all(self) -> tuple[int, ...]:
        """Ranks of all guests."""
        return tuple(sorted(self._guests))

    def gone(self) -> tuple[int, ...]:
        """Ranks of those whose QEMU has ended."""
        return tuple(sorted(self._gone))

    def watch(self, ended: Callable[[], None]) -> None:
        """Notice ends of guests from now on; ``ended`` is called in a thread of its own after each."""
        fds: dict[int, int] = {}
        for rank, guest in self._guests.items():
            opened = [fd for ref in guest.qemu if (fd := _open(ref)) is not None]
            fds.update((fd, rank) for fd in opened)
            if not opened:
                self._gone.append(rank)
        if fds:
            threading.Thread(target=self._watch, args=(fds, ended), name="watch", daemon=True).start()

    def _watch(self, fds: dict[int, int], ended: Callable[[], None]) -> None:
        poller = select.poll()
        for fd in fds:
            poller.register(fd, select.POLLIN)
        while fds:
            for fd, _ in poller.poll():
                poller.unregister(fd)
                os.close(fd)
                rank = fds.pop(fd)
                if rank not in fds.values():
                    log.info("guest %s has ended", self._guests[rank].hostname)
                    self._gone.append(rank)
                    ended()

    def tell(self, known: Membership) -> tuple[str, ...]:
        """Tell living guests what they have not been told yet; names of those that have not taken it."""
        state = _state(known)
        asked = [
            guest
            for rank, guest in self._guests.items()
            if rank not in self._gone and self._told.get(rank) != state
        ]
        until = time.monotonic() + TELL_S
        threads = [
            threading.Thread(target=self._tell, args=(guest, state, until), daemon=True) for guest in asked
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        return tuple(
            guest.hostname
            for guest in asked
            if self._told.get(guest.rank) != state and guest.rank not in self._gone
        )

    def _tell(self, guest: OwnGuest, state: _State, until: float) -> None:
        def left() -> float:
            return max(0.1, until - time.monotonic())

        try:
            with GuestChannel.connect(guest.folder / ROOT_SOCKET, CONNECT_S) as channel:
                channel.hello(left(), wait_for_boot=False)
                tell(channel, *state, left())
        except (VhpcError, OSError) as err:
            line = err.line() if isinstance(err, VhpcError) else str(err)
            if not (isinstance(err, ChannelRefusedError) and err.errno == errno.ENOSYS):
                self._complain(guest, f"does not take the members of its cluster: {line}")
                return
            self._complain(guest, "does not show the members of its cluster: its agent is too old")
        else:
            self._silent.discard(guest.rank)
        self._told[guest.rank] = state

    def _complain(self, guest: OwnGuest, line: str) -> None:
        """One line until it has taken something."""
        if guest.rank not in self._silent and guest.rank not in self._gone:
            log.warning("guest %s %s", guest.hostname, line)
        self._silent.add(guest.rank)


def cluster_guests(known: Membership) -> list[ClusterGuest]:
    """The guests of all members, as guests are told of them, by their addresses."""
    return [guest for member in _members(known) for guest in _guests_of(member)]


def _members(known: Membership) -> list[ClusterMember]:
    return sorted((known.own, *known.others), key=lambda member: member.segment.first)


def _guests_of(member: ClusterMember) -> Iterator[ClusterGuest]:
    for one in living(member):
        yield ClusterGuest(one.name, member.generation.job_id, *one.addresses, one.guest.slots)


def _state(known: Membership) -> _State:
    members = _members(known)
    hosts = tuple(dict.fromkeys(one.host_public for one in members if one.host_public))
    users = tuple(dict.fromkeys(one.user_public for one in members if one.user_public))
    guests = tuple(cluster_guests(known))
    return _State(known.name, known.own.generation.job_id, guests, hosts, users, known.uid)


def _own_guests(layout: Layout, held: Sequence[Entry], own: ClusterMember, node: str) -> Iterator[OwnGuest]:
    """QEMU has a uid that only its guest's helpers have too; these are in the journal."""
    noted = {entry.read(ProcessData).ref for entry in held if entry.kind == Process.kind}
    guests = plan.members(own)
    for entry in held:
        if entry.kind == Domain.kind:
            data = entry.read(DomainData)
            folder = layout.guest_of(data.name)
            index = int(folder.name.removeprefix("g"))
            rank = next(rank for rank, one in enumerate(guests) if (one.node, one.index) == (node, index))
            refs = tuple(ref for ref in process.of_uid(data.uid) if ref not in noted)
            yield OwnGuest(rank, guests[rank].hostname, folder, refs)


def _open(ref: process.ProcessRef) -> int | None:
    """A pidfd; None if the process has ended."""
    try:
        fd = os.pidfd_open(ref.pid)
    except OSError:
        return None
    if process.alive(ref):
        return fd
    os.close(fd)
    return None
