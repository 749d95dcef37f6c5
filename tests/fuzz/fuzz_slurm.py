# SPDX-License-Identifier: Apache-2.0
# promise: attack.job-name
"""Fuzz what Slurm's commands print, in which users' texts stand unquoted.

The first line of an input is the command, the rest its output.  ``text`` stands
for neither: the rest becomes name and working directory of a captured job, and
nothing but these may then be read differently.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

from rig import InternalError, fuzz

from vhpc_slurm.errors import UserError
from vhpc_slurm.slurm.parse import narrower, parse_job, parse_ref, parse_squeue
from vhpc_slurm.slurm.port import SlurmError, SlurmJob

_DATA = Path(__file__).parents[1] / "data/scontrol"
_CAPTURED = {
    path.parent.name: path.read_text() for path in sorted(_DATA.glob("*/single.txt"))
}  # version -> record
JOB = int(_CAPTURED["24.11"].removeprefix("JobId=").split()[0])


def _texts(text: str) -> None:
    for version, record in _CAPTURED.items():
        job = int(record.removeprefix("JobId=").split()[0])
        true = parse_job(record, job)
        forged = record.replace(f"JobName={true.name}", f"JobName={text}", 1)
        forged = forged.replace(f"WorkDir={true.work_dir}", f"WorkDir=/{text}", 1)
        try:
            if narrower(forged, job):
                raise InternalError("a job that is no array is taken for one")
            found = parse_job(forged, job)
        except (UserError, SlurmError):
            continue
        if _told(found) != _told(true):
            raise InternalError(f"in {version} a text has become more than a text: {found}")


def _told(job: SlurmJob) -> SlurmJob:
    """The job without the user's own texts."""
    return replace(job, name="", work_dir="")


def one_input(data: bytes) -> None:
    """Let the reader of that command read it."""
    name, _, raw = data.partition(b"\n")
    text = raw.decode(errors="replace")
    if name == b"text":
        _texts(text)
        return
    with contextlib.suppress(SlurmError, UserError):
        if name == b"squeue":
            parse_squeue(text)
        elif name == b"ref":
            parse_ref(text, 1)
        elif name == b"scontrol":
            narrower(text, JOB)
            parse_job(text, JOB)


if __name__ == "__main__":
    fuzz(one_input)
