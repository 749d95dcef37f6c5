# SPDX-License-Identifier: Apache-2.0
"""What is on this node against what should be: findings, each with its repair.

Three views are compared: the journals, the node itself (libvirt, processes,
uids, folders, pins) and the controller's leases.  What belongs to a running
hook is left alone; what belongs to a job that the controller still has is
kept; everything else is an orphan.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from vhpc_slurm.errors import VhpcError
from vhpc_slurm.model import Generation
from vhpc_slurm.node import teardown
from vhpc_slurm.node.devices import assignment, quarantine, setup
from vhpc_slurm.node.devices.quarantine import QuarantinedError
from vhpc_slurm.node.guest import libvirtd
from vhpc_slurm.node.host import cgroup, process, steps
from vhpc_slurm.node.store import images, joblock, journal, kinds, outbox, reservations, uids
from vhpc_slurm.node.store.layout import Layout


@dataclass(frozen=True)
class NodeFinding:
    """Something that should not be there.

    ``kind`` is one word for machines, ``what`` one line for people, ``repair``
    removes it and raises VhpcError when it cannot.
    """

    kind: str
    what: str
    repair: Callable[[], object]


def _never(job_id: int) -> bool:
    del job_id
    return False


def audit(
    layout: Layout,
    node: str,
    live: Mapping[int, Generation] | None,
    purged: Callable[[int], bool] = _never,
) -> list[NodeFinding]:
    """Compare the views.

    Args:
        layout: where to look.
        node: this node's name.
        live: generations that the controller holds for this node and that are
            not ending, by job; None when the controller could not be asked,
            then no generation that has a journal is called stale.
        purged: whether slurmctld is sure to know nothing of a job; asked only
            about jobs that have ended and whose steps still run here.
    """
    return [
        *_stale_generations(layout, node, live, purged),
        *_orphan_domains(layout),
        *_orphan_processes(layout),
        *_orphan_uids(layout),
        *_orphan_cgroups(layout),
        *_orphan_folders(layout),
        *_orphan_pins(layout),
        *_unparked_functions(layout),
    ]


def _known(layout: Layout) -> list[Generation]:
    """Generations that have a journal now.

    A job may boot beside an audit.  What it takes is in its journal before it
    is there, so whoever looks for orphans looks at them first and at the
    journals afterwards, and once more before anything is removed.
    """
    return list(journal.generations(layout.journals))


def _unless(owned: Callable[[], bool], repair: Callable[[], object]) -> Callable[[], object]:
    """Repair only what has no journal at that moment either."""

    def act() -> None:
        if not owned():
            repair()

    return act


def waiting(layout: Layout) -> int:
    """How many acknowledgements vhpcd has not received."""
    return len(outbox.pending(layout.outbox))


def _stale_generations(
    layout: Layout, node: str, live: Mapping[int, Generation] | None, purged: Callable[[int], bool]
) -> Iterator[NodeFinding]:
    if live is None:
        return
    running = steps.running()
    for generation in _known(layout):
        if live.get(generation.job_id) == generation or joblock.busy(layout, generation.job_id):
            continue
        # The lease ends with the job, when Slurm has only begun to end its processes: they have KillWait
        # to say their last words in, and then the Epilog comes. None comes for a job that a killed slurmctld
        # has forgotten, while the step of its allocation may sleep on for hours.
        over = generation.job_id in running and generation.job_id not in live
        if over and not purged(generation.job_id):
            continue
        yield NodeFinding(
            "stale-generation",
            f"generation {generation} is still here, and the controller has it no more",
            partial(tombstone_and_clear, layout, generation, node),
        )


def unacknowledged(layout: Layout, node: str, ending: Sequence[Generation]) -> Iterator[NodeFinding]:
    """Generations that are over and that the controller believes to be here, although nothing of them is.

    A hook that is killed between the end of a journal and its word to the
    controller leaves neither, and the generation's key would never be free.

    Args:
        layout: where to look.
        node: this node's name.
        ending: generations whose leases have ended and that this node has taken and not acknowledged.
    """
    running = steps.running()
    known = {*_known(layout), *(Generation.parse(path.stem) for path in outbox.pending(layout.outbox))}
    for generation in ending:
        # An Epilog is to come, or at work: that one knows more.
        if generation in known or generation.job_id in running or joblock.busy(layout, generation.job_id):
            continue
        yield NodeFinding(
            "unacknowledged",
            f"nothing is left of generation {generation}, and the controller was not told",
            partial(tombstone_and_clear, layout, generation, node),
        )


def tombstone_and_clear(layout: Layout, generation: Generation, node: str) -> None:
    """Remove all of a generation that nobody else will remove, and leave word of it for the controller.

    Raises:
        TeardownError: not all of it could be removed.
    """
    joblock.write_tombstone(layout, generation)
    with joblock.held(layout, generation.job_id, timeout_s=30.0, brief=True):
        quarantined: QuarantinedError | None = None
        try:
            teardown.clear(layout, generation, node)
        except QuarantinedError as err:
            quarantined = err
    note = quarantined.line() if quarantined else "cleared by reconcile"
    outbox.put(layout.outbox, outbox.Acknowledgement(generation, node, clean=True, note=note))
    if quarantined:
        raise quarantined


def _orphan_domains(layout: Layout) -> Iterator[NodeFinding]:
    config = layout.config.guests
    try:
        with libvirtd.connect(config.libvirt_uri, config.stage_timeout_s) as hypervisor:
            names = hypervisor.names()
    except VhpcError as err:
        line = err.line()
        yield NodeFinding("libvirt", line, partial(_raise, err))
        return

    def owned(name: str) -> bool:
        ours = {f"{libvirtd.PREFIX}{g.job_id}-{g.restart}-{g.nonce}" for g in _known(layout)}
        return name.rpartition("-g")[0] in ours

    for name in names:
        if not owned(name):
            repair = _unless(partial(owned, name), partial(_destroy, layout, name))
            yield NodeFinding("orphan-domain", f"guest {name} has no journal", repair)


def _destroy(layout: Layout, name: str) -> None:
    config = layout.config.guests
    with libvirtd.connect(config.libvirt_uri, config.stage_timeout_s) as hypervisor:
        hypervisor.destroy(name)


def _orphan_processes(layout: Layout) -> Iterator[NodeFinding]:
    found = {ref: name for ref, name in process.marked() if not _is_known(layout, name)}
    for ref, name in found.items():
        repair = _unless(partial(_is_known, layout, name), partial(process.end, ref))
        yield NodeFinding("orphan-process", f"process {ref.pid} of generation {name[:40]!r}", repair)
    in_use = {uid for uid in process.uids_in_use() if uids.in_range(layout.config, uid)}
    for uid in in_use - {uid for uid, _ in uids.allocated(layout)}:
        for ref in set(process.of_uid(uid)) - found.keys():
            repair = _unless(partial(_is_allocated, layout, uid), partial(process.end, ref))
            yield NodeFinding(
                "orphan-process", f"process {ref.pid} with uid {uid}, which no generation has", repair
            )


def _is_known(layout: Layout, name: str) -> bool:
    return name in {str(generation) for generation in _known(layout)}


def _is_allocated(layout: Layout, uid: int) -> bool:
    return uid in {other for other, _ in uids.allocated(layout)}


def _orphan_uids(layout: Layout) -> Iterator[NodeFinding]:
    for uid, name in list(uids.allocated(layout)):
        if not _is_known(layout, name):
            repair = _unless(partial(_is_known, layout, name), partial(uids.release, layout, uid, name))
            yield NodeFinding("orphan-uid", f"uid {uid} is allocated to generation {name[:40]!r}", repair)


def _orphan_cgroups(layout: Layout) -> Iterator[NodeFinding]:
    for name in sorted(cgroup.generations()):
        if not _is_known(layout, name):
            repair = _unless(partial(_is_known, layout, name), partial(_end_cgroup, name))
            yield NodeFinding(
                "orphan-cgroup", f"control group of generation {name[:40]!r} has no journal", repair
            )


def _end_cgroup(name: str) -> None:
    group = cgroup.Cgroup.of(name)
    group.kill()
    group.remove()


def _orphan_folders(layout: Layout) -> Iterator[NodeFinding]:
    with contextlib.suppress(FileNotFoundError):
        for path in sorted(layout.jobs.iterdir()):
            if not _is_of_known_job(layout, path.name):
                repair = _unless(partial(_is_of_known_job, layout, path.name), partial(shutil.rmtree, path))
                yield NodeFinding("orphan-folder", f"folder {path} has no journal", repair)


def _is_of_known_job(layout: Layout, name: str) -> bool:
    return name.isdigit() and int(name) in {generation.job_id for generation in _known(layout)}


def _orphan_pins(layout: Layout) -> Iterator[NodeFinding]:
    for digest, name in list(images.pins(layout)):
        if not _is_known(layout, name):
            repair = _unless(partial(_is_known, layout, name), partial(images.unpin, layout, digest, name))
            what = f"image {digest[:19]}… is pinned by generation {name[:40]!r}"
            yield NodeFinding("orphan-pin", what, repair)


def _unparked_functions(layout: Layout) -> Iterator[NodeFinding]:
    """Virtual functions that are on a network, and no guest has them."""
    try:
        known = {record.address for record in quarantine.read_records(layout)}
        free = [one for one in setup.made(layout) if one not in known and not _has(layout, one)]
    except VhpcError as err:  # a journal or a record is damaged: who has what is not known
        yield NodeFinding("stray-function", err.line(), partial(_raise, err))
        return
    for address in free:
        wrong = assignment.why_not_parked(layout, address)
        if wrong:
            what = f"virtual function {address} is nobody's: {wrong}"
            yield NodeFinding("stray-function", what, partial(_park_orphan, layout, address))


def _has(layout: Layout, address: str) -> bool:
    """Whether a generation has planned for a device, or not given it back yet."""
    return any(
        address == entry.data.get("address") or address in entry.data.get("devices", ())
        for generation in _known(layout)
        for entry in journal.read_entries(layout.journals, generation)
        if entry.kind in (kinds.DEVICE, kinds.RESERVATION)
    )


def _park_orphan(layout: Layout, address: str) -> None:
    # under the lock that plans are made under: whoever comes first has it
    with reservations.plan_lock(layout, layout.config.guests.stage_timeout_s):
        if not _has(layout, address):
            assignment.park_orphan(layout, address)


def _raise(err: VhpcError) -> None:
    raise err
