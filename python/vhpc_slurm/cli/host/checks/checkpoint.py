# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: their folder, and the settings of Slurm that jobs with --vhpc-checkpoint need."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path

from vhpc_slurm.cli.host.checks import CheckResult, error, ok, warn
from vhpc_slurm.config import Config
from vhpc_slurm.controller.leases import timed
from vhpc_slurm.errors import NodeError
from vhpc_slurm.node.checkpoint import folder
from vhpc_slurm.slurm.port import NodeResources, SlurmPartition
from vhpc_slurm.slurm.settings import SlurmSettings


def check(
    config: Config, settings: SlurmSettings, partitions: Sequence[SlurmPartition]
) -> Iterator[CheckResult]:
    """Results for Slurm's settings; none where jobs cannot be saved."""
    if not config.checkpoint.folder:
        return
    if settings.first("JobRequeue") == "0":
        yield warn(
            "checkpoint.JobRequeue",
            "JobRequeue=0: jobs with --vhpc-checkpoint are refused unless they have --requeue",
            "JobRequeue=1",
        )
    else:
        yield ok("checkpoint.JobRequeue", "jobs that are saved can be put back into the queue")
    if settings.first("JobFileAppend") == "0":
        yield warn(
            "checkpoint.JobFileAppend",
            "JobFileAppend=0: the output file of a job that continues in its next run is emptied, unless the "
            "job has --open-mode=append",
            "JobFileAppend=1, or tell users",
        )
    least = least_grace_s(config)
    for partition in partitions:
        if "REQUEUE" in partition.preempt_mode.upper().split(",") and partition.grace_s < least:
            yield warn(
                "checkpoint.GraceTime",
                f"partition {partition.name} has GraceTime={partition.grace_s}: preempted jobs end before "
                "they are saved",
                f"GraceTime={least} or more, by the memory of the nodes",
            )


def least_grace_s(config: Config) -> int:
    """The shortest GraceTime in which a job with little memory is saved."""
    return math.ceil(timed.overhead_s(config))


def on_node(config: Config, own: NodeResources) -> Iterator[CheckResult]:
    """Results for the folder as root of this node sees it."""
    if not config.checkpoint.folder:
        return
    root, name = Path(config.checkpoint.folder), "checkpoint.folder"
    try:
        with folder.opened(root) as fd:
            free = os.fstatvfs(fd)
    except NodeError as err:
        hint = f"make it on a file system that all nodes share: install -d -m 0700 -o root {root}"
        yield error(name, err.line(), hint)
        return
    free_mib = free.f_bavail * free.f_frsize >> 20
    if free_mib < own.memory_mib:
        yield warn(
            name,
            f"{root} has {free_mib} MiB free, less than the memory of this node ({own.memory_mib} MiB)",
            f"a checkpoint takes as much as its guests use: {math.ceil(own.memory_mib / 1024)} GiB for each "
            "node that saves",
        )
    else:
        yield ok(name, f"{root} belongs to root and has {free_mib} MiB free")
    if config.checkpoint.encrypt:
        yield _encryption()


def _encryption() -> CheckResult:
    try:
        import_module("cryptography.hazmat.primitives.ciphers.aead")
    except ImportError as err:
        return error("checkpoint.encrypt", f"jobs cannot be saved: {err}", "apt install python3-cryptography")
    return ok("checkpoint.encrypt", "checkpoints are encrypted")
