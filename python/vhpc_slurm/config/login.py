# SPDX-License-Identifier: Apache-2.0
"""The table [login] of vhpc.toml: every key of it, its meaning and its default."""

from __future__ import annotations

from typing import Annotated

import msgspec

from vhpc_slurm.config.setting import documented


class Login(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Jobs of vhpc cluster login: small guests from which users work with a cluster."""

    partition: Annotated[
        str,
        documented(
            "partition of Slurm in which the jobs of vhpc cluster login run, one CPU each; nodes that "
            "several jobs share suit best. Empty: users name one with --partition",
            pattern=r"^[^\s,]*$",
        ),
    ] = ""
    image: Annotated[
        str,
        documented(
            "image of these guests, as [own/]NAME:TAG; it needs OpenSSH, and the MPI library of the "
            "cluster's images for mpirun. Empty: users name one with --image"
        ),
    ] = ""
    memory_mib: Annotated[
        int,
        documented("memory of such a job, in MiB, of which guests.memory_reserve_mib is no guest's", ge=1),
    ] = 1024
