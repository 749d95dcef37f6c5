# SPDX-License-Identifier: Apache-2.0
"""Options of sbatch, salloc and srun, each declared once.

A declaration says how an option is called and described, what its values are, what limits them, and which
field of a job's request has the value. From the declarations follow: the plugin's table with --help and the
manual (``table``, which the build runs), the decoding in PrologSlurmctld, limits and defaults of the policy,
arguments of `vhpc plan` and `vhpc policy`, and lines of `vhpc report`. Python's standard library only:
hosts that build vhpc need no other one.
"""

from __future__ import annotations

from vhpc_slurm.options.declared import (
    BATCH,
    CLUSTER,
    DISK,
    ENV,
    ENVIRONMENT,
    GUESTS_PER_NODE,
    IMAGE,
    MAX_GUESTS_PER_NODE,
    MAX_SIZE_MIB,
    MAX_TIMEOUT_S,
    MAX_VFS,
    MIN_DISK_MIB,
    MOUNT,
    NETWORK,
    OPTIONS,
    TIMEOUT,
    VFS,
    WORKDIR,
    BatchPlace,
)
from vhpc_slurm.options.environment import parse_environment
from vhpc_slurm.options.grammars import (
    CHECKPOINT_NAME,
    CLUSTER_NAME,
    ValueRefusedError,
    cluster_account,
    is_cluster_name,
    parse_cluster,
)
from vhpc_slurm.options.mountpoint import Mount, mount_point_refusal, parse_mounts
from vhpc_slurm.options.option import Limit, Option
from vhpc_slurm.options.saving import CHECKPOINT, RESUME, SAVE

__all__ = [
    "BATCH",
    "BY_FIELD",
    "CHECKPOINT",
    "CHECKPOINT_NAME",
    "CLUSTER",
    "CLUSTER_NAME",
    "DISK",
    "ENV",
    "ENVIRONMENT",
    "GUESTS_PER_NODE",
    "IMAGE",
    "MAX_GUESTS_PER_NODE",
    "MAX_SIZE_MIB",
    "MAX_TIMEOUT_S",
    "MAX_VFS",
    "MIN_DISK_MIB",
    "MOUNT",
    "NETWORK",
    "OPTIONS",
    "RESUME",
    "SAVE",
    "TIMEOUT",
    "VFS",
    "WORKDIR",
    "BatchPlace",
    "Limit",
    "Mount",
    "Option",
    "ValueRefusedError",
    "cluster_account",
    "is_cluster_name",
    "mount_point_refusal",
    "parse_cluster",
    "parse_environment",
    "parse_mounts",
]

BY_FIELD = {option.field: option for option in OPTIONS if option.fields}
"""Options by the field of ``JobRequest`` that has their value."""
