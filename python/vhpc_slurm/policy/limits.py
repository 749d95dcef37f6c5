# SPDX-License-Identifier: Apache-2.0
"""Limits of a rule for what options of a job ask for, as they are after its defaults.  Pure."""

from __future__ import annotations

from collections.abc import Iterable

from vhpc_slurm.config import Config
from vhpc_slurm.config.disks import hidden
from vhpc_slurm.config.policy import Rule
from vhpc_slurm.model import Allocation, JobRequest
from vhpc_slurm.policy.rules import Subject, applying, network_refusal
from vhpc_slurm.record import Record


class Asked(Record, frozen=True):
    """What a job asks for; None where it asks for nothing, or where that is not known.

    ``disk_mib`` is in MiB, ``timeout_s`` in seconds; ``network`` has the words of --vhpc-network.
    ``disk_mount`` is empty for a disk that takes the changes to the root.
    """

    network: tuple[str, ...] | None = None
    disk_mib: int | None = None
    batch: str | None = None
    guests_per_node: int | None = None
    vfs: int | None = None
    timeout_s: int | None = None
    disk_mount: str = ""


def mount_refusal(mount: str, folders: Iterable[str]) -> str:
    """Why a disk cannot be mounted at a directory of guests that have these folders of hosts; or empty."""
    if not mount or not (folder := hidden(mount, folders)):
        return ""
    return (
        f"a disk cannot be mounted at {mount}, because guests have the shared folder {folder} "
        "(--vhpc-disk=SIZE:DIRECTORY with one that is not above, on or below it)"
    )


def limit_refusal(config: Config, request: JobRequest, allocation: Allocation) -> str:
    """Why the rule that applies to a job does not permit its numbers, as one line; empty if it does."""
    rule = applying(config.policy, Subject.of(request))
    if rule is None:
        return ""
    refusal = refused(rule, _of(config, request, allocation))
    return f"policy rule {rule.name!r} refuses the job: {refusal}" if refusal else ""


def refused(rule: Rule, asked: Asked) -> str:
    """The first limit of a rule that a job exceeds, and what to do; empty if there is none."""
    found = (
        network_refusal(rule, asked.network or ()),
        _guests(rule, asked.guests_per_node),
        _disk(rule, asked.disk_mib),
        _batch(rule, asked.batch),
        _vfs(rule, asked.vfs),
        _timeout(rule, asked.timeout_s),
    )
    return next((why for why in found if why), "")


def _of(config: Config, request: JobRequest, allocation: Allocation) -> Asked:
    """What a job with an allocation has; its network is judged with its image."""
    name, vfs = config.placement.vf_gres, request.vfs
    if vfs is None:
        counts = (sum(gres.count for gres in node.gres if gres.name == name) for node in allocation.nodes)
        vfs = max(counts, default=0)
    return Asked(
        disk_mib=request.disk_mib,
        batch=request.batch.value,
        guests_per_node=request.guests_per_node,
        vfs=vfs,
        timeout_s=request.timeout_s,
    )


def _disk(rule: Rule, mib: int | None) -> str:
    most = rule.max_disk_mib
    if most is None or mib is None or mib <= most:
        return ""
    if most == 0:
        return "it permits no disks (submit the job without --vhpc-disk)"
    return f"it permits disks up to {most} MiB, the job asks for {mib} (--vhpc-disk={most}M or less)"


def _batch(rule: Rule, place: str | None) -> str:
    if place is None or place in rule.batch:
        return ""
    return f"it does not permit the batch script on the {place} (use --vhpc-batch={rule.batch[0]})"


def _guests(rule: Rule, count: int | None) -> str:
    most = rule.max_guests_per_node
    if most is None or count is None or count <= most:
        return ""
    return (
        f"it permits {most} guests on a node, the job asks for {count} "
        f"(--vhpc-guests-per-node={most} or less)"
    )


def _vfs(rule: Rule, count: int | None) -> str:
    most = rule.max_vfs
    if most is None or count is None or count <= most:
        return ""
    return f"it permits {most} virtual functions on a node, the job asks for {count} (ask for fewer)"


def _timeout(rule: Rule, seconds: int | None) -> str:
    most = rule.max_timeout_s
    if most is None or seconds is None or seconds <= most:
        return ""
    return f"it permits a boot of {most} s, the job asks for {seconds} s (--vhpc-timeout={most} or less)"
