"""What is on this node against what should be: findings, each with its cure.

Three views are compared: the journals, the node itself (libvirt, processes,
uids, folders, pins) and the controller's leases.  What belongs to a running
hook is left alone; what belongs to a job that the controller still has is
kept; everything else is an orphan.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from vhpc_slurm.errors import VhpcError
from vhpc_slurm.model import Generation
from vhpc_slurm.node import guest, images, joblock, journal, outbox, process, steps, teardown, uids
from vhpc_slurm.node.layout import Layout


@dataclass(frozen=True)
class Finding:
    """Something that should not be there.

    ``kind`` is one word for machines, ``what`` one line for people, ``mend``
    removes it and raises VhpcError when it cannot.
    """

    kind: str
    what: str
    mend: Callable[[], object]


def audit(layout: Layout, node: str, live: Mapping[int, Generation] | None) -> list[Finding]:
    """Compare the views.

    Args:
        layout: where to look.
        node: this node's name.
        live: generations that the controller holds for this node and that are
            not ending, by job; None when the controller could not be asked,
            then no generation that has a journal is called stale.
    """
    known = list(journal.generations(layout.journals))
    return [
        *_stale_generations(layout, node, known, live),
        *_orphan_domains(layout, known),
        *_orphan_processes(layout, known),
        *_orphan_uids(layout, known),
        *_orphan_folders(layout, known),
        *_orphan_pins(layout, known),
    ]


def waiting(layout: Layout) -> int:
    """How many acknowledgements vhpcd has not received."""
    return len(outbox.pending(layout.outbox))


def _stale_generations(
    layout: Layout, node: str, known: list[Generation], live: Mapping[int, Generation] | None
) -> Iterator[Finding]:
    if live is None:
        return
    running = steps.running()
    for generation in known:
        if live.get(generation.job_id) == generation or joblock.busy(layout, generation.job_id):
            continue
        # The lease ends with the job, when Slurm has only begun to end its processes: they have KillWait
        # to say their last words in, and then the Epilog comes.
        if generation.job_id in running and generation.job_id not in live:
            continue
        yield Finding(
            "stale-generation",
            f"generation {generation} is still here, and the controller has it no more",
            partial(_bury_and_clear, layout, generation, node),
        )


def _bury_and_clear(layout: Layout, generation: Generation, node: str) -> None:
    joblock.bury(layout, generation)
    with joblock.held(layout, generation.job_id, timeout_s=30.0):
        teardown.clear(layout, generation, node)
    outbox.put(
        layout.outbox, outbox.Acknowledgement(generation, node, clean=True, note="cleared by reconcile")
    )


def _orphan_domains(layout: Layout, known: list[Generation]) -> Iterator[Finding]:
    config = layout.config.guests
    ours = {f"{guest.PREFIX}{g.job_id}-{g.restart}-{g.nonce}" for g in known}
    try:
        with guest.connect(config.libvirt_uri, config.stage_timeout_s) as hypervisor:
            names = hypervisor.names()
    except VhpcError as err:
        line = err.line()
        yield Finding("libvirt", line, partial(_raise, err))
        return
    for name in names:
        if name.rpartition("-g")[0] not in ours:
            yield Finding("orphan-domain", f"guest {name} has no journal", partial(_destroy, layout, name))


def _destroy(layout: Layout, name: str) -> None:
    config = layout.config.guests
    with guest.connect(config.libvirt_uri, config.stage_timeout_s) as hypervisor:
        hypervisor.destroy(name)


def _orphan_processes(layout: Layout, known: list[Generation]) -> Iterator[Finding]:
    names = {str(g) for g in known}
    found = {ref: f"of generation {name[:40]!r}" for ref, name in process.marked() if name not in names}
    claimed = {uid for uid, _ in uids.claims(layout)}
    for uid in process.uids_in_use() - claimed:
        if uids.in_range(layout.config, uid):
            found |= dict.fromkeys(process.of_uid(uid), f"with unclaimed uid {uid}")
    for ref, why in found.items():
        yield Finding("orphan-process", f"process {ref.pid} {why}", partial(process.end, ref))


def _orphan_uids(layout: Layout, known: list[Generation]) -> Iterator[Finding]:
    names = {str(g) for g in known}
    for uid, name in uids.claims(layout):
        if name not in names:
            yield Finding(
                "orphan-uid",
                f"uid {uid} is claimed by generation {name[:40]!r}",
                partial(uids.release, layout, uid, name),
            )


def _orphan_folders(layout: Layout, known: list[Generation]) -> Iterator[Finding]:
    jobs = {g.job_id for g in known}
    with contextlib.suppress(FileNotFoundError):
        for path in sorted(layout.jobs.iterdir()):
            if not path.name.isdigit() or int(path.name) not in jobs:
                yield Finding("orphan-folder", f"folder {path} has no journal", partial(shutil.rmtree, path))


def _orphan_pins(layout: Layout, known: list[Generation]) -> Iterator[Finding]:
    names = {str(g) for g in known}
    for digest, name in images.pins(layout):
        if name not in names:
            yield Finding(
                "orphan-pin",
                f"image {digest[:19]}… is pinned by generation {name[:40]!r}",
                partial(images.unpin, layout, digest, name),
            )


def _raise(err: VhpcError) -> None:
    raise err
