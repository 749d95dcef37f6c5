# SPDX-License-Identifier: Apache-2.0
"""Guests that continue a checkpoint, and guests that can be saved into one."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from pathlib import Path

from vhpc_slurm.domain.render import render
from vhpc_slurm.domain.spec import DomainSpec
from vhpc_slurm.errors import UserError
from vhpc_slurm.model import Resume, SavedGuest, Share
from vhpc_slurm.node.boot.state import Boot, Started
from vhpc_slurm.node.checkpoint import facts, fifo, restore
from vhpc_slurm.node.checkpoint.facts import GuestFacts, NodeFacts
from vhpc_slurm.node.guest import snapshots
from vhpc_slurm.node.guest.libvirtd import DomainRefusedError
from vhpc_slurm.node.store import disks
from vhpc_slurm.node.store.layout import domain_name


def check(work: Boot, resume: Resume) -> None:
    """See that this node can continue its part of the checkpoint, before anything is started.

    Raises:
        UserError: it cannot, or has no folder of checkpoints.
    """
    if not work.layout.config.checkpoint.folder:
        raise UserError(
            f"the checkpoint cannot be resumed on {work.plan.node}", "checkpoint.folder is not set there"
        )
    _, qemu = work.hypervisor.version()
    saved = resume.nodes[_place(work)]
    restore.check(saved, work.plan.node, work.plan.guests, facts.cpu_of(work.host), qemu)


def find_snapshots(work: Boot, resume: Resume) -> tuple[Share, ...]:
    """The plan's folders with the snapshots of the saved guests; UserError if one is not there any more."""
    files = dict(_saved(work, resume, 0).snapshots)
    return snapshots.saved(work.layout.config, work.plan.shares, files)


def copy_disks(work: Boot, resume: Resume) -> Generator[None, None, None]:
    """Copy the saved disks into those of the guests; yields after each.

    Raises:
        UserError: the checkpoint is damaged or not there.
        NodeError: a disk cannot be written.
    """
    for guest in work.plan.guests:
        if guest.disk_mib:
            disk = disks.path(work.layout, work.lease.generation, guest.index)
            restore.restore_disk(_root(work), resume, _saved(work, resume, guest.index), disk)
            yield


def start(work: Boot, resume: Resume, spec: DomainSpec, watch: Callable[[], None]) -> None:
    """Have libvirt start QEMU with the saved state, instead of ``create``.

    Raises:
        UserError: the checkpoint is damaged or not there, or libvirt does not restore it.
        NodeError: as ``Hypervisor.create``.
    """
    guest, xml = spec.guest, render(spec)
    saved = _saved(work, resume, guest.index)
    limit_s = guest.start_timeout_s + restore.timeout_s(saved)

    def load(path: str) -> None:
        work.hypervisor.restore(path, xml, limit_s, watch)

    try:
        restore.restore_state(_root(work), resume, saved, Path(guest.paths.run_dir) / fifo.NAME, xml, load)
    except DomainRefusedError as err:
        raise UserError(
            f"the checkpoint {resume.name} cannot be resumed on {work.plan.node}",
            err.why,
            "submit it again, then on nodes like those of the first job, or resume an older checkpoint",
        ) from err


def keep_facts(work: Boot, started: Sequence[Started]) -> None:
    """Write down what a checkpoint of these guests needs, if they can be saved; OSError if that fails."""
    layout, plan, generation = work.layout, work.plan, work.lease.generation
    if not facts.is_saveable(layout.config, plan.guests):
        return
    first = _place(work) * len(plan.guests)
    guests = []
    for one in started:
        guest, shim = one.guest.plan, one.helpers.shim
        assert shim is not None
        guests.append(
            GuestFacts(
                index=guest.index,
                rank=first + guest.index,
                hostname=guest.hostname,
                domain=domain_name(generation, guest.index),
                vcpus=len(guest.pins),
                memory_mib=guest.memory_mib,
                disk=str(disks.path(layout, generation, guest.index)) if guest.disk_mib else "",
                shim=shim,
                daemons=one.helpers.share_daemons,
                snapshots=snapshots.kept(one.guest.shares),
            )
        )
    facts.write(layout, NodeFacts(generation, plan.node, facts.cpu_of(work.host), tuple(guests)))


def _saved(work: Boot, resume: Resume, index: int) -> SavedGuest:
    return resume.nodes[_place(work)].guests[index]


def _place(work: Boot) -> int:
    """The number of this node among those of the job."""
    return work.lease.allocation.node_names.index(work.plan.node)


def _root(work: Boot) -> Path:
    return Path(work.layout.config.checkpoint.folder)
