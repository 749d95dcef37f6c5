# SPDX-License-Identifier: Apache-2.0
"""Acknowledgements on their way to vhpcd, with what the generation has used.

The last node of a job to report writes the sum, how long the boot took, and the checkpoint with which the
run has ended, into the job's AdminComment, because root may and vhpcd may not. Accounting delays no release:
what fails here is only missing in the comment.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from vhpc_slurm import slurm
from vhpc_slurm.config import Config
from vhpc_slurm.controller.client import ControllerClient
from vhpc_slurm.controller.exchange import AnswerError, UnusableError
from vhpc_slurm.errors import FabricError, VhpcError
from vhpc_slurm.model import Figures, Generation, JobUsage, NodeUsage, job_usage
from vhpc_slurm.node.host import apart
from vhpc_slurm.node.store import outbox
from vhpc_slurm.node.store.outbox import Acknowledgement
from vhpc_slurm.slurm import comments
from vhpc_slurm.slurm.port import COMPLETING, PENDING
from vhpc_slurm.slurm.sacct import COMMENT_MAX, AccountedJob, Accounting

log = logging.getLogger("vhpc")

RECORD_S = 5.0
"""How long to wait for the job's end in the accounting database: slurmctld sends it a moment before."""
LOOK_S = 0.5
NOTE_MAX = 200
"""Characters of the note of an acknowledgement that is sent again."""


def deliver(
    config: Config,
    client: ControllerClient,
    folder: Path,
    unkept: Sequence[Acknowledgement] = (),
    *,
    hold: bool = True,
) -> int:
    """Send the acknowledgements that wait in the outbox, then write comments; returns how many still wait.

    Comments come last, because they wait for accounting. After a command of Slurm has failed no further
    one is tried: many acknowledgements may have waited, and each command may take until its deadline.

    Args:
        config: names vhpcd and Slurm's commands.
        client: of vhpcd.
        folder: the outbox.
        unkept: those that had no room there; what vhpcd does not get now, a health check finds missing.
        hold: False: a process that continues when this hook ends writes the comments; no lock may be held.
    """
    complete: list[Generation] = []

    def send(ack: Acknowledgement) -> None:
        if _acknowledge(client, ack):
            complete.append(ack.generation)

    left = outbox.flush(folder, send)
    for ack in unkept:
        try:
            send(ack)
        except (outbox.NotTakenError, outbox.RefusedError) as err:
            log.warning("a health check will acknowledge it again: %s", err.line())
        except FabricError as err:
            log.warning("a health check will acknowledge it again: %s", err.line())
            break

    def comment() -> None:
        for generation in complete:
            if not _comment(config, client, generation):
                break

    if complete and (hold or not apart.run(comment)):
        comment()
    return left


def _acknowledge(client: ControllerClient, ack: Acknowledgement) -> bool:
    """Send an acknowledgement; without its timeline where vhpcd cannot use it with one.

    Returns whether vhpcd has the figures of all nodes now.

    Raises:
        outbox.RefusedError, outbox.NotTakenError: vhpcd has answered.
        FabricError: vhpcd cannot be reached.
    """
    all_reported = False
    try:
        if ack.usage is not None:
            try:
                return _kept(ack.generation, client.report_and_acknowledge(ack.usage, ack))
            except UnusableError:  # an older vhpcd, or one of the two is at fault
                all_reported = _report(client, ack.usage)
        try:
            client.acknowledge(ack)
        except UnusableError as err:
            log.error("vhpcd cannot use the acknowledgement of %s: %s", ack.generation, err.line())
            note = ack.note[:NOTE_MAX].encode("ascii", errors="replace").decode()
            client.acknowledge(replace(ack, note=note, timeline=None))
            log.warning("vhpcd has acknowledged %s without its timeline", ack.generation)
    except UnusableError as err:
        raise outbox.RefusedError(err.what, err.why, err.hint) from err
    except AnswerError as err:
        raise outbox.NotTakenError(err.what, err.why, err.hint) from err
    except FabricError:
        raise
    except VhpcError as err:
        raise outbox.NotTakenError(err.what, err.why, err.hint) from err
    return all_reported


def _report(client: ControllerClient, usage: NodeUsage) -> bool:
    """Whether vhpcd has the figures of all nodes now."""
    try:
        return _kept(usage.generation, client.report_usage(usage))
    except VhpcError as err:
        return _kept(usage.generation, err)


def _kept(generation: Generation, answer: bool | VhpcError) -> bool:
    if isinstance(answer, VhpcError):
        log.warning("what job %d has used is not reported: %s", generation.job_id, answer.line())
        return False
    return answer


def _comment(config: Config, client: ControllerClient, generation: Generation) -> bool:
    """Whether all commands have worked."""
    job_id = generation.job_id
    try:
        _, nodes = client.usage(job_id)
        accounting = slurm.accounting(config)
        job = _record(accounting, job_id)
        if job is None:
            return True
        sentence = _of_checkpoint(config, client, generation, job)
        if not job.ended:
            _comment_requeued(config, generation, sentence)
            return True
        boot_s = _boot_s(client, generation)
        text = with_usage(with_sentence(job.comment, sentence), words(job_usage(nodes), boot_s))
        if text != job.comment:
            accounting.set_comment(job, text)
    except VhpcError as err:
        log.info("AdminComment of job %d has no usage: %s", job_id, err.line())  # some sites have no slurmdbd
        return False
    return True


def _of_checkpoint(
    config: Config, client: ControllerClient, generation: Generation, job: AccountedJob
) -> str:
    """The sentence about the last checkpoint of a run that has ended; empty without one."""
    if not config.checkpoint.folder:
        return ""
    try:
        made = [one for one in client.checkpoints(generation.job_id) if one.generation == generation]
    except VhpcError as err:
        log.info("AdminComment of job %d names no checkpoint: %s", generation.job_id, err.line())
        return ""
    return comments.at_end(made, job.state, requeued=not job.ended)


def _comment_requeued(config: Config, generation: Generation, sentence: str) -> None:
    """Add to the comment of a job that waits for its next run, whose PrologSlurmctld replaces it."""
    if not sentence:
        return
    port = slurm.commands(config, slurm.HOOK_TIMEOUT_S)
    job, present = port.load_with_comment(generation.job_id)
    if job.restarts == generation.restart + 1 and job.state in (PENDING, COMPLETING):
        port.set_admin_comment(job.job_id, comments.add(present, sentence))


def _boot_s(client: ControllerClient, generation: Generation) -> float | None:
    """Seconds until the guests of the slowest node were ready; None if those of a node were not."""
    records = client.leases(job_id=generation.job_id)
    return next((one.ready_s for one in records if one.lease.generation == generation), None)


def _record(accounting: Accounting, job_id: int) -> AccountedJob | None:
    """The record of a job that has ended, or waits for its next run; None, with a line in the log, without.

    The figures of a run that is not the last one are in no comment.
    """
    until = time.monotonic() + RECORD_S
    while True:
        job = accounting.job(job_id)
        if job is not None and job.ended:
            return job
        requeued = job is not None and job.state in ("PENDING", "REQUEUED")
        if requeued or time.monotonic() >= until:
            log.info(
                "AdminComment of job %d has no usage: the accounting database does not have its end", job_id
            )
            return job if requeued else None
        time.sleep(LOOK_S)


def with_sentence(comment: str, sentence: str) -> str:
    """An AdminComment of vhpc with one more sentence; with other text it stays as it is."""
    if not sentence or comments.others(comment):
        return comment
    return comments.add(comments.without_usage(comment), sentence)


def with_usage(comment: str, usage: str) -> str:
    """An AdminComment of vhpc with these figures instead of earlier ones; with other text it stays as it is.

    Tools for job statistics store encoded data there, which no other program may cut or append to, and
    sacctmgr replaces quotation marks.
    """
    if comments.others(comment):
        return comment
    before = comments.without_usage(comment) or comments.OURS
    room = COMMENT_MAX - len(usage) - 2
    return f"{before[:room]}{';' if before != comments.OURS else ''} {usage}"


def words(used: JobUsage, boot_s: float | None = None) -> str:
    """The figures as words NAME=VALUE, without those that are not known; ``boot_s`` is that of the boot."""
    figures = used.whole
    found = [
        *_seconds(figures),
        *(f"{name}={value}" for name, value in (*_bytes(figures), *_shared(used)) if value is not None),
        *([] if figures.oom_kills is None else [f"oom_kills={figures.oom_kills}"]),
        *_gpus(used),
        f"guests={used.guests - len(used.missing)}/{used.guests}",
        *([] if boot_s is None else [f"boot_s={boot_s:.1f}"]),
    ]
    return "usage " + " ".join(found)


def _seconds(figures: Figures) -> list[str]:
    named = (("cpu_s", figures.cpu_us), ("user_s", figures.user_us), ("system_s", figures.system_us))
    return [f"{name}={value / 1e6:.2f}" for name, value in named if value is not None]


def _gpus(used: JobUsage) -> list[str]:
    """The mean use of the GPUs that have figures, and the most memory of one of them."""
    busy = [gpu.busy_e4 for _, _, gpu in used.gpus if gpu.busy_e4 is not None]
    memory = [gpu.memory_bytes for _, _, gpu in used.gpus if gpu.memory_bytes is not None]
    return [
        *([f"gpu_busy_percent={sum(busy) / len(busy) / 100:.1f}"] if busy else []),
        *([f"gpu_peak_bytes={max(memory)}"] if memory else []),
    ]


def _shared(used: JobUsage) -> tuple[tuple[str, int | None], ...]:
    if used.shared is None:
        return ()
    return (
        ("shared_read_bytes", used.shared.read_bytes),
        ("shared_written_bytes", used.shared.written_bytes),
    )


def _bytes(figures: Figures) -> tuple[tuple[str, int | None], ...]:
    return (
        ("peak_bytes", figures.peak_bytes),
        ("largest_process_bytes", figures.rss_bytes),
        ("read_bytes", figures.read_bytes),
        ("written_bytes", figures.written_bytes),
    )
