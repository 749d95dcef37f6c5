# SPDX-License-Identifier: Apache-2.0
"""Options of sbatch that save the guests of a job, or continue them."""

from __future__ import annotations

from vhpc_slurm.options.grammars import CheckpointName, Moments, OwnImage
from vhpc_slurm.options.option import Option

MAX_INTERVAL_MIN = 10080
"""Between two checkpoints: a week."""

SAVE = Option(
    "save",
    OwnImage(),
    "own/NAME[:TAG]",
    usage="make an image of the guest when the batch script has succeeded",
    detail=(
        "When the batch script ends with status 0, what the job's first guest has in its root then becomes "
        "the image NAME of the user's own catalogue, as by `vhpc save`. The job ends when that is done, "
        "within its time limit; if it fails, so does the job, with one line on its stderr. For sbatch only, "
        "with the batch script in the guest, and where the site has catalogues of users."
    ),
)

CHECKPOINT = Option(
    "checkpoint",
    Moments(("limit", "preempt"), MAX_INTERVAL_MIN),
    "none|LIST",
    usage="when the job is saved by itself, and continued",
    detail=(
        "none (the default), or a list of words with commas between them. limit: before its time limit ends "
        "the job, its guests are saved and the job is put back into the queue; its next run continues the "
        "batch script after the instruction at which it was saved, and so on until the script has ended. "
        "preempt: the same when a job of higher priority preempts this one, if the partition's GraceTime is "
        "long enough. every:N: the job is saved every N minutes (30m) or hours (2h) and continues; if Slurm "
        "requeues it, for example after the failure of a node, its next run continues from there. A job "
        "whose steps do not end in time is not saved, and Slurm ends it as without the option. Submit such "
        "jobs with --open-mode=append. For sbatch only; not with --vhpc-batch=host."
    ),
    fields=("checkpoint",),
    reported=True,
)

RESUME = Option(
    "resume",
    CheckpointName(),
    "NAME",
    usage="continue the guests of a job that was saved by vhpc checkpoint",
    detail=(
        "The guests of the job are those that the newest valid checkpoint NAME of the user has saved, and "
        "its batch script continues after the instruction at which it was saved; the script of sbatch is "
        "not run. The job must have as many nodes, CPUs and MiB of memory as the job that was saved, which "
        "must have ended. Image, folders, disks and networks are those of the checkpoint: of the other "
        "options only --vhpc-timeout, --vhpc-console and --vhpc-checkpoint can be given. For sbatch only."
    ),
    fields=("resume",),
    reported=True,
)
