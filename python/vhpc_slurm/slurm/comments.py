# SPDX-License-Identifier: Apache-2.0
"""AdminComment of a job: vhpc's text at its start, behind it the text of another program.  Pure.

A job_submit plugin of the site may set an AdminComment before the job starts, and tools for job
statistics replace it after the job's end.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from vhpc_slurm.model import JOB_ENDED, UNFINISHED, Checkpoint, CheckpointState, Lease

OURS = "vhpc:"
"""How each AdminComment of vhpc begins."""
_BESIDE = " // "
_USAGE = re.compile(r"(?:; | )usage (?:[a-z_]+=[0-9./]+ ?)+$")
_MAX = 1024
"""Characters of both texts."""
_CUT_OFF = ("TIMEOUT", "PREEMPTED", "DEADLINE", "NODE_FAIL")
"""States of jobs that Slurm has ended although their scripts would have continued."""


def of_lease(lease: Lease, more: str = "") -> str:
    """Our text about a job: the digest of its image, the checkpoint that it continues, and a message."""
    image, resume = "" if lease.image is None else f"image {lease.image}", ""
    if lease.resume is not None:
        resume = f"continues checkpoint {lease.resume.name} of job {lease.resume.origin.job_id}"
    return f"{OURS} " + "; ".join(filter(None, (image, resume, more)))


def saved(name: str) -> str:
    """The sentence about a job that was saved and continues."""
    return f"saved as checkpoint {name}"


def at_end(made: Sequence[Checkpoint], state: str, *, requeued: bool) -> str:
    """The sentence about a run that has ended; empty if its last checkpoint has nothing to do with its end.

    Args:
        made: the checkpoints of the run, oldest first.
        state: of the job, by sacct.
        requeued: the job is in the queue again.
    """
    if not made:
        return ""
    last = made[-1]
    if last.state is CheckpointState.FAILED or last.state in UNFINISHED:
        if not (last.stop and (requeued or state in _CUT_OFF)):
            return ""
        # vhpcd tries until the job ends, so an attempt before has the reason
        why = next((one for one in reversed(made) if one.error not in ("", JOB_ENDED)), last)
        return f"not saved before its end: checkpoint {why.name}: {why.error or JOB_ENDED}"
    if not last.stop:
        return saved(last.name)
    return f"{'requeued' if requeued else 'stopped'} with checkpoint {last.name}"


def add(comment: str, sentence: str) -> str:
    """An AdminComment with one more sentence of ours, before the text of another program."""
    ours = comment.partition(_BESIDE)[0] if comment.startswith(OURS) else OURS
    if not sentence or sentence in ours:
        return comment
    return beside(f"{ours}{';' if ours != OURS else ''} {sentence}", comment)


def without_usage(comment: str) -> str:
    """The text without the figures of what the job has used."""
    return _USAGE.sub("", comment)


def others(comment: str) -> str:
    """The text of another program in an AdminComment; usually empty."""
    if not comment.startswith(OURS):
        return comment.strip()
    return without_usage(comment).partition(_BESIDE)[2]


def beside(text: str, comment: str) -> str:
    """Our text, and behind it the other program's text of the present AdminComment if it has room."""
    foreign = others(comment)
    both = f"{text}{_BESIDE}{foreign}"
    return both if foreign and len(both) <= _MAX else text
