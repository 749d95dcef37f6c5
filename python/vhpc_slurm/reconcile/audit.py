# SPDX-License-Identifier: Apache-2.0
"""Orphans and stale generations on this node, each with its repair.

Compares the journals, the node itself (libvirt, processes, uids, folders, pins)
and vhpcd's leases.  What belongs to a running hook or to a job with a live
lease stays; everything else is an orphan.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from vhpc_slurm.errors import VhpcError
from vhpc_slurm.model import Generation
from vhpc_slurm.node import teardown
from vhpc_slurm.node.devices import assignment, quarantine, setup
from vhpc_slurm.node.devices.quarantine import QuarantinedError
from vhpc_slurm.node.guest import busy, libvirtd
from vhpc_slurm.node.host import cgroup, process, steps
from vhpc_slurm.node.store import disks, joblock, journal, kinds, outbox, pins, reservations, uids, usage
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.reconcile import segments
from vhpc_slurm.reconcile.finding import Kind, NodeFinding


def _never(job: object) -> bool:
    del job
    return False


def audit(
    layout: Layout,
    node: str,
    live: Mapping[int, Generation] | None,
    ended: Callable[[int], bool] = _never,
    left: Callable[[Generation], bool] = _never,
    before: Collection[Generation] | None = None,
) -> list[NodeFinding]:
    """Find stale generations and orphans.

    Args:
        layout: where the node keeps its state.
        node: this node's name.
        live: generations with a live lease for this node, by job; None when vhpcd did not answer,
            then only a generation whose end was interrupted counts as stale.
        ended: whether a job has ended for slurmctld, which waits for no Epilog of it; called
            only for jobs without a live lease whose steps still run here.
        left: whether this node has left the running job of a generation; called only
            for generations with a live lease of which no step runs here.
        before: generations that had a journal before vhpcd was asked for ``live``, which says nothing about
            others; None: all.
    """
    return [
        *_stale_generations(layout, node, live, ended, left, before),
        *_orphan_domains(layout),
        *_orphan_processes(layout),
        *_orphan_uids(layout),
        *_orphan_cgroups(layout),
        *_orphan_folders(layout),
        *_orphan_pins(layout),
        *_orphan_disks(layout),
        *_unparked_functions(layout),
        *segments.audit(layout),
    ]


def _known(layout: Layout) -> list[Generation]:
    """Generations that have a journal now.

    A job may boot during an audit.  Prolog writes a resource to the journal
    before it takes the resource, so an audit lists resources first, reads the
    journals afterwards, and reads them again before it removes anything.
    """
    return list(journal.generations(layout.journals))


def _unless(owned: Callable[[], bool], repair: Callable[[], object]) -> Callable[[], object]:
    """Repair only if there is still no journal when the repair runs."""

    def act() -> None:
        if not owned():
            repair()

    return act


def _stale_generations(
    layout: Layout,
    node: str,
    live: Mapping[int, Generation] | None,
    ended: Callable[[int], bool],
    left: Callable[[Generation], bool],
    before: Collection[Generation] | None,
) -> Iterator[NodeFinding]:
    running = steps.running()
    for generation in _known(layout):
        if joblock.end_was_interrupted(layout, generation):
            # Slurm and vhpcd may have the job for as long as nobody tells them that it has ended here.
            if generation in _known(layout):
                yield NodeFinding(
                    Kind.STALE_GENERATION,
                    f"generation {generation} has a journal on this node, and its Epilog was interrupted",
                    partial(tombstone_and_clear, layout, generation, node),
                )
            continue
        if live is None or joblock.busy(layout, generation.job_id):
            continue
        if before is not None and generation not in before:
            continue
        if live.get(generation.job_id) == generation:
            # Slurm takes nodes from running jobs.
            if generation.job_id not in running and left(generation):
                yield NodeFinding(
                    Kind.STALE_GENERATION,
                    f"generation {generation} has a journal on this node, which has left the job",
                    partial(tombstone_and_clear, layout, generation, node),
                )
            continue
        # The lease ends with the job, when Slurm has only begun to end its processes: they have KillWait
        # seconds, and then the Epilog runs.  No Epilog runs for a job for whose end Slurm does not wait any
        # more, while its extern step may sleep on for hours.
        over = generation.job_id in running and (generation.job_id not in live or not generation.has_lease)
        if over and not ended(generation.job_id):
            continue
        yield NodeFinding(
            Kind.STALE_GENERATION,
            f"generation {generation} has a journal on this node, but no live lease",
            partial(tombstone_and_clear, layout, generation, node),
        )


def unacknowledged(layout: Layout, node: str, ending: Sequence[Generation]) -> Iterator[NodeFinding]:
    """Generations that have ended here and left nothing, and that vhpcd waits for.

    A hook that is killed after it removed a journal and before it queued the
    acknowledgement leaves neither, and vhpcd would never free the key.

    Args:
        layout: where the node keeps its state.
        node: this node's name.
        ending: generations that this node took and has not acknowledged, and whose lease has ended or whose
            Epilog has begun here.
    """
    running = steps.running()
    known = {*_known(layout), *outbox.queued(layout.outbox)}
    for generation in ending:
        if generation in known or joblock.busy(layout, generation.job_id):
            continue  # its Epilog still has to run, or runs now, and will acknowledge it
        if generation.job_id in running and not joblock.has_tombstone(layout, generation):
            continue
        yield NodeFinding(
            Kind.UNACKNOWLEDGED,
            f"generation {generation} has ended here, but vhpcd has no acknowledgement",
            partial(tombstone_and_clear, layout, generation, node),
        )


def tombstone_and_clear(layout: Layout, generation: Generation, node: str) -> None:
    """Remove everything of a generation that has no Epilog to come, and queue its acknowledgement.

    Raises:
        TeardownError: something could not be removed.
    """
    joblock.write_tombstone(layout, generation)
    with joblock.held(layout, generation.job_id, timeout_s=30.0, brief=True):
        quarantined: QuarantinedError | None = None
        try:
            teardown.clear(layout, generation, node)
        except QuarantinedError as err:
            quarantined = err
    note = quarantined.line() if quarantined else "cleared by reconcile"
    if generation.has_lease:
        used = usage.of_node(layout.usage(generation), generation, node)
        outbox.put(layout.outbox, outbox.Acknowledgement(generation, node, clean=True, note=note, usage=used))
    if quarantined:
        raise quarantined


def _orphan_domains(layout: Layout) -> Iterator[NodeFinding]:
    config = layout.config.guests
    try:
        with libvirtd.connect(config.libvirt_uri, config.stage_timeout_s) as hypervisor:
            names = hypervisor.names()
        busy.forget(layout)
    except libvirtd.BusyError as err:
        kind = Kind.LIBVIRT if busy.persists(layout, err) else Kind.LIBVIRT_BUSY
        yield NodeFinding(kind, err.line(), partial(_raise, err))
        return
    except VhpcError as err:
        line = err.line()
        yield NodeFinding(Kind.LIBVIRT, line, partial(_raise, err))
        return

    def owned(name: str) -> bool:
        ours = {f"{libvirtd.PREFIX}{g.job_id}-{g.restart}-{g.nonce}" for g in _known(layout)}
        return name.rpartition("-g")[0] in ours

    for name in names:
        if not owned(name):
            repair = _unless(partial(owned, name), partial(_destroy, layout, name))
            yield NodeFinding(Kind.ORPHAN_DOMAIN, f"libvirt domain {name} belongs to no journal", repair)


def _destroy(layout: Layout, name: str) -> None:
    config = layout.config.guests
    with libvirtd.connect(config.libvirt_uri, config.stage_timeout_s) as hypervisor:
        hypervisor.destroy(name)


def _orphan_processes(layout: Layout) -> Iterator[NodeFinding]:
    found = {ref: name for ref, name in process.marked() if not _is_known(layout, name)}
    for ref, name in found.items():
        repair = _unless(partial(_is_known, layout, name), partial(process.end, ref))
        yield NodeFinding(
            Kind.ORPHAN_PROCESS,
            f"process {ref.pid} is of generation {name[:40]!r}, which has no journal",
            repair,
        )
    in_use = {uid for uid in process.uids_in_use() if uids.in_range(layout.config, uid)}
    for uid in in_use - {uid for uid, _ in uids.allocated(layout)}:
        for ref in set(process.of_uid(uid)) - found.keys():
            repair = _unless(partial(_is_allocated, layout, uid), partial(process.end, ref))
            yield NodeFinding(
                Kind.ORPHAN_PROCESS,
                f"process {ref.pid} has uid {uid}, which is allocated to no generation",
                repair,
            )


def _is_known(layout: Layout, name: str) -> bool:
    return name in {str(generation) for generation in _known(layout)}


def _is_allocated(layout: Layout, uid: int) -> bool:
    return uid in {other for other, _ in uids.allocated(layout)}


def _orphan_uids(layout: Layout) -> Iterator[NodeFinding]:
    for uid, name in list(uids.allocated(layout)):
        if not _is_known(layout, name):
            repair = _unless(partial(_is_known, layout, name), partial(uids.release, layout, uid, name))
            yield NodeFinding(
                Kind.ORPHAN_UID,
                f"uid {uid} is allocated to generation {name[:40]!r}, which has no journal",
                repair,
            )


def _orphan_cgroups(layout: Layout) -> Iterator[NodeFinding]:
    for name in sorted(cgroup.generations()):
        if not _is_known(layout, name):
            repair = _unless(partial(_is_known, layout, name), partial(_end_cgroup, name))
            yield NodeFinding(
                Kind.ORPHAN_CGROUP, f"control group of generation {name[:40]!r}, which has no journal", repair
            )


def _end_cgroup(name: str) -> None:
    group = cgroup.Cgroup.of(name)
    group.kill()
    group.remove()


def _orphan_folders(layout: Layout) -> Iterator[NodeFinding]:
    with contextlib.suppress(FileNotFoundError):
        for path in sorted(layout.jobs.iterdir()):
            if not _is_of_known_job(layout, path.name):
                repair = _unless(partial(_is_of_known_job, layout, path.name), partial(_remove, path))
                yield NodeFinding(Kind.ORPHAN_FOLDER, f"{path} belongs to no journal", repair)


def _remove(path: Path) -> None:
    """Remove a folder with all in it, or a file or link that somebody has put in a folder's place."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path)


def _is_of_known_job(layout: Layout, name: str) -> bool:
    return name.isdecimal() and int(name) in {generation.job_id for generation in _known(layout)}


def _orphan_pins(layout: Layout) -> Iterator[NodeFinding]:
    for digest, name in list(pins.pins(layout)):
        if not _is_known(layout, name):
            repair = _unless(partial(_is_known, layout, name), partial(pins.unpin, layout, digest, name))
            what = f"image {digest[:19]}… is pinned by generation {name[:40]!r}, which has no journal"
            yield NodeFinding(Kind.ORPHAN_PIN, what, repair)


def _orphan_disks(layout: Layout) -> Iterator[NodeFinding]:
    for generation, index in list(disks.existing(layout)):
        name = str(generation)
        if not _is_known(layout, name):
            repair = _unless(
                partial(_is_known, layout, name), partial(disks.delete, layout, generation, index)
            )
            path = disks.path(layout, generation, index)
            yield NodeFinding(Kind.ORPHAN_DISK, f"disk {path} belongs to no journal", repair)


def _unparked_functions(layout: Layout) -> Iterator[NodeFinding]:
    """Virtual functions that are on a network although no generation holds them."""
    try:
        known = {record.address for record in quarantine.read_records(layout)}
        free = [one for one in setup.made(layout) if one not in known and not _has(layout, one)]
    except VhpcError as err:  # a journal or a record is damaged: it is unknown which generation holds what
        yield NodeFinding(Kind.UNPARKED_FUNCTION, err.line(), partial(_raise, err))
        return
    for address in free:
        wrong = assignment.why_not_parked(layout, address)
        if wrong:
            what = f"virtual function {address} belongs to no job but is not parked: {wrong}"
            yield NodeFinding(Kind.UNPARKED_FUNCTION, what, partial(_park_orphan, layout, address))


def _has(layout: Layout, address: str) -> bool:
    """Whether a generation has reserved a device, or has not released it yet."""
    return any(
        address == entry.data.get("address") or address in entry.data.get("devices", ())
        for generation in _known(layout)
        for entry in journal.read_entries(layout.journals, generation)
        if entry.kind in (kinds.DEVICE, kinds.RESERVATION)
    )


def _park_orphan(layout: Layout, address: str) -> None:
    # Prolog reserves devices under the same lock: either it has reserved this one, or it finds it parked.
    with reservations.plan_lock(layout, layout.config.guests.stage_timeout_s):
        if not _has(layout, address):
            assignment.park_orphan(layout, address)


def _raise(err: VhpcError) -> None:
    raise err
