# SPDX-License-Identifier: Apache-2.0
"""A guest: its domain in libvirt, and its QEMU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from vhpc_slurm.errors import NodeError, VhpcError
from vhpc_slurm.model import Generation
from vhpc_slurm.node import finding
from vhpc_slurm.node.finding import Kind, NodeFinding
from vhpc_slurm.node.guest import busy, libvirtd
from vhpc_slurm.node.guest.usage import AskedGuest
from vhpc_slurm.node.host import process
from vhpc_slurm.node.resource import uid as uids
from vhpc_slurm.node.resource.process import Process, ProcessData
from vhpc_slurm.node.resource.protocol import Resource, unless
from vhpc_slurm.node.store import journal
from vhpc_slurm.node.store.journal import Entry, Journal
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.record import Record


class DomainData(Record, frozen=True):
    """The entry of a domain: its name, and the uid of its QEMU."""

    name: str
    uid: int


class Domain(Resource):
    """The domain of a guest."""

    kind = "domain"

    def take(self, journal: Journal, name: str, uid: int, create: Callable[[], object]) -> None:
        """Have libvirt start a guest.

        Args:
            journal: of the generation.
            name: of the domain.
            uid: of its QEMU.
            create: starts the domain; its exceptions are passed on.
        """
        journal.announce(self.kind, f"{self.kind}:{name}", DomainData(name, uid))
        create()

    def release(self, layout: Layout, generation: Generation, entry: Entry) -> None:
        """End a guest through libvirt, and by its uid where libvirt cannot.

        libvirtd may be down exactly when a node is being cleaned.  Its QEMU has a
        uid of its own, so it can be ended all the same; libvirt notices when it is
        back.  After a reboot the uid may be another guest's: allocations do not outlive
        the processes that they are for, journals do.
        """
        found = entry.read(DomainData)
        uid = found.uid
        try:
            _destroy(layout, found.name)
        except NodeError:
            if not uids.in_range(layout.config, uid):
                raise
        if uids.held(layout, uid, str(generation)):
            for ref in process.of_uid(uid):
                process.end(ref)

    def orphans(self, layout: Layout) -> Iterator[NodeFinding]:
        """Domains of generations without a journal; a libvirt that does not answer."""
        config = layout.config.guests
        try:
            with libvirtd.connect(config.libvirt_uri, config.stage_timeout_s) as hypervisor:
                names = hypervisor.names()
            busy.forget(layout)
        except libvirtd.BusyError as err:
            yield finding.of_error(Kind.LIBVIRT if busy.persists(layout, err) else Kind.LIBVIRT_BUSY, err)
            return
        except VhpcError as err:
            yield finding.of_error(Kind.LIBVIRT, err)
            return
        for name in names:
            owned = partial(_is_owned, layout, name)
            if not owned():
                repair = unless(owned, partial(_destroy, layout, name))
                yield NodeFinding(Kind.ORPHAN_DOMAIN, f"libvirt domain {name} belongs to no journal", repair)


def _is_owned(layout: Layout, name: str) -> bool:
    known = journal.generations(layout.journals)
    return name.rpartition("-g")[0] in {f"{libvirtd.PREFIX}{g.job_id}-{g.restart}-{g.nonce}" for g in known}


def _destroy(layout: Layout, name: str) -> None:
    config = layout.config.guests
    with libvirtd.connect(config.libvirt_uri, config.stage_timeout_s) as hypervisor:
        hypervisor.destroy(name)


def held_guests(layout: Layout, held: Sequence[Entry]) -> list[AskedGuest]:
    """The guests of a generation with the daemons of their shared folders, from its journal."""
    found = []
    for domain in held:
        if domain.kind != Domain.kind:
            continue
        folder = layout.guest_of(domain.read(DomainData).name)
        mark = f"{Process.kind}:{folder.name}:"
        helpers = [
            entry.read(ProcessData)
            for entry in held
            if entry.kind == Process.kind and entry.key.startswith(mark)
        ]
        refs = [helper.ref for helper in helpers if helper.role == "virtiofsd"]
        noted = tuple(ref for ref in refs if ref is not None)
        found.append(AskedGuest(folder, noted if len(noted) == len(refs) else None))
    return found
