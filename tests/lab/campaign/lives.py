# SPDX-License-Identifier: Apache-2.0
"""Jobs of a campaign of checkpoints: their program, whose output shows each lost or repeated turn."""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

MEMORY, SLICE = 24 << 20, 64 << 10
"""Bytes of random data that the program keeps, and how many of them each turn reads."""

# Each turn writes a number and a digest of all turns so far, which the bytes of its memory are part of.
PROGRAM = f"""
import hashlib, os, random, sys, time
turns, rank, job = int(sys.argv[1]), int(os.environ.get("SLURM_PROCID", "0")), os.environ["SLURM_JOB_ID"]
memory = random.Random(rank).randbytes({MEMORY})
digest = hashlib.sha256()
own = open(f"/var/tmp/turns.{{rank}}", "w+")
home = open(os.path.expanduser(f"~/{{job}}.{{rank}}.log"), "w")
for turn in range(1, turns + 1):
    at = turn * {SLICE} % {MEMORY}
    digest.update(memory[at : at + {SLICE}])
    line = f"{{rank}} {{turn}} {{digest.hexdigest()[:16]}}"
    for file in (own, home, sys.stdout):
        print(line, file=file, flush=True)
    time.sleep(0.25)
own.seek(0)
print(f"{{rank}} has {{len(set(own))}} turns", flush=True)
"""
LINE = re.compile(r"(\d+) (\d+) ([0-9a-f]{16})$")


@dataclass(frozen=True)
class Kind:
    """A kind of job: its script after the program is in ``$program``, options of sbatch, and its tasks."""

    script: str
    options: tuple[str, ...]
    ranks: tuple[int, ...]


KINDS = {
    "script": Kind('python3 -c "$program" TURNS', ("-n1",), (0,)),
    # a task that was killed ends the others, and the script: the job has failed, and continues its checkpoint
    "step": Kind('srun -K python3 -c "$program" TURNS', ("-N1", "-n2"), (0, 1)),
    "two-guests": Kind('srun -K python3 -c "$program" TURNS', ("-N2", "--ntasks-per-node=1"), (0, 1)),
}


def script(kind: Kind, turns: int) -> str:
    """The batch script of a job."""
    assert "'" not in PROGRAM
    return f"program='{PROGRAM}'\n{kind.script.replace('TURNS', str(turns))} || exit\necho end"


def digests(rank: int, turns: int) -> list[str]:
    """The digest of each turn from 1 on, found without a guest."""
    memory, digest, found = random.Random(rank).randbytes(MEMORY), hashlib.sha256(), []
    for turn in range(1, turns + 1):
        at = turn * SLICE % MEMORY
        digest.update(memory[at : at + SLICE])
        found.append(digest.hexdigest()[:16])
    return found


def turns_of(text: str, rank: int) -> list[tuple[int, str]]:
    """Turns of one task in an output, in order, with their digests."""
    found = (LINE.match(line) for line in text.splitlines())
    return [(int(line[2]), line[3]) for line in found if line is not None and int(line[1]) == rank]


def last_turns(text: str, ranks: Sequence[int]) -> dict[int, int]:
    """The last turn of each task that its output has; 0 without one."""
    return {rank: (turns_of(text, rank) or [(0, "")])[-1][0] for rank in ranks}


@dataclass(frozen=True)
class Return:
    """The next run may begin at an earlier turn: a fault has ended this one.

    Attributes:
        after: the last turn of each task in the output of the run that has ended.  None: it may be any, and
            the script may have ended: slurmctld was killed, and starts a job again whose start it had not
            written to its disk.
        least: the newest checkpoint holds each task's turns up to this one at least; 0: there is none.
    """

    after: dict[int, int] | None
    least: dict[int, int]


def lines(rank: int, turns: int) -> list[str]:
    """All that a task writes in its turns."""
    return [f"{rank} {turn} {digest}" for turn, digest in enumerate(digests(rank, turns), 1)]


def wrong(text: str, ranks: Sequence[int], turns: int, returns: Sequence[Return]) -> Iterator[str]:
    """Errors in the output of all runs of a job that has completed, one clause each."""
    for rank in ranks:
        truth, last = digests(rank, turns), 0
        for turn, digest in turns_of(text, rank):
            if not 0 < turn <= turns or digest != truth[turn - 1]:
                yield f"task {rank} has wrong bytes in turn {turn}"
            if turn > last + 1:
                yield f"task {rank} has lost turns {last + 1} to {turn - 1}"
            if turn <= last and not any(
                (one.after is None or one.after[rank] == last) and one.least[rank] < turn for one in returns
            ):
                yield f"task {rank} repeats turns {turn} to {last}"
            last = turn
        if last != turns:
            yield f"task {rank} ends with turn {last}"
        if f"{rank} has {turns} turns" not in text.splitlines():
            yield f"task {rank} has other turns in its own file"
    if not 1 <= text.splitlines().count("end") <= 1 + sum(one.after is None for one in returns):
        yield "the script has not ended once"
