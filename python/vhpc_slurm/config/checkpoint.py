# SPDX-License-Identifier: Apache-2.0
"""The table [checkpoint] of vhpc.toml: every key of it, its meaning and its default."""

from __future__ import annotations

from typing import Annotated

import msgspec

from vhpc_slurm.config.setting import documented


class Checkpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Checkpoints of jobs (vhpc checkpoint)."""

    folder: Annotated[
        str,
        documented(
            "folder for the saved guests, the same file system on all nodes; it belongs to root, and only "
            "root may enter it; empty: jobs cannot be saved",
            pattern=r"^(|/[^\x00]+)$",
        ),
    ] = ""
    hold_timeout_s: Annotated[
        int,
        documented(
            "how long all guests of a job may take to stop for a checkpoint; then it is given up and the "
            "guests continue",
            ge=1,
            le=3600,
        ),
    ] = 60
    write_mib_s: Annotated[
        int,
        documented(
            "at which rate a node writes to the folder at least, in MiB/s: from this follows how long before "
            "its end the first checkpoint of a job with --vhpc-checkpoint=limit begins",
            ge=1,
            le=1000000,
        ),
    ] = 100
    encrypt: Annotated[
        bool,
        documented(
            "encrypt what is saved (AES-256-GCM); vhpcd has the keys, and nodes need python3-cryptography. "
            "Earlier checkpoints stay as they are"
        ),
    ] = False
    max_age_days: Annotated[
        int,
        documented(
            "a checkpoint is deleted so many days after it was made; it stays while the job that was saved, "
            "or the last one that has continued it, waits in Slurm's queue or runs; 0: it is never too old",
            ge=0,
            le=36500,
        ),
    ] = 0
