# SPDX-License-Identifier: Apache-2.0
"""Limits of a rule for what options of a job ask for, as they are after its defaults.  Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from vhpc_slurm.config import Config
from vhpc_slurm.config.disks import hidden, within
from vhpc_slurm.config.policy import LIMITED, Rule
from vhpc_slurm.model import Allocation, JobRequest
from vhpc_slurm.options import NETWORK, VFS, Option, parse_mounts
from vhpc_slurm.policy.rules import Subject, applying, listed


def mount_refusal(mount: str, folders: Iterable[str]) -> str:
    """Why a disk cannot be mounted at a directory of guests that have these folders of hosts; or empty."""
    if not mount or not (folder := hidden(mount, folders)):
        return ""
    return (
        f"a disk cannot be mounted at {mount}, because guests have the shared folder {folder} "
        "(--vhpc-disk=SIZE:DIRECTORY with one that is not above, on or below it)"
    )


def bind_refusal(mounts: str | None, disk_mount: str, sites: Iterable[str]) -> str:
    """Why folders cannot be mounted at second places in guests with these folders of hosts; or empty.

    Args:
        mounts: a value of --vhpc-mount.
        disk_mount: directory at which the disk of a guest is mounted; or empty.
        sites: folders of hosts that are known to be in the guests.
    """
    folders = tuple(sites)
    for mount in parse_mounts(mounts or ""):
        if folder := hidden(mount.target, folders):
            return (
                f"--vhpc-mount={mount}: guests have the shared folder {folder} "
                "(choose a directory in the guest that is not above, on or below it)"
            )
        if disk_mount and f"{disk_mount}/".startswith(f"{mount.target}/"):
            return (
                f"--vhpc-mount={mount}: the disk is mounted at {disk_mount} "
                "(choose a directory in the guest that is not above or on it)"
            )
    return ""


def unshared(mounts: str | None, folders: Iterable[str]) -> str:
    """Why guests that have these folders of hosts, and no others, lack the source of a mount; or empty."""
    held = tuple(folders)
    for mount in parse_mounts(mounts or ""):
        if not any(within(mount.source, folder) for folder in held):
            has = f"they have {', '.join(held)}" if held else "they have none"
            return (
                f"--vhpc-mount={mount}: {mount.source} is in no folder of the hosts that the guests have "
                f"({has}; see --vhpc-shares)"
            )
    return ""


def limit_refusal(config: Config, request: JobRequest, allocation: Allocation) -> str:
    """Why the rule that applies to a job does not permit its options, as one line; empty if it does.

    Its network is judged with its image.
    """
    rule = applying(config.policy, Subject.of(request))
    if rule is None:
        return ""
    asked = {one.field: getattr(request, one.field) for one in LIMITED if one is not NETWORK}
    if request.vfs is None:
        asked[VFS.field] = _counted(config, allocation)
    refusal = refused(rule, asked)
    return f"policy rule {rule.name!r} refuses the job: {refusal}" if refusal else ""


def refused(rule: Rule, asked: Mapping[str, Any]) -> str:
    """The first limit of a rule that a job exceeds, and what to do; empty if there is none.

    Args:
        rule: the rule that applies.
        asked: by the field of ``JobRequest``, what the job asks for; None or absent if it asks for
            nothing, or if that is not known.
    """
    found = (option_refusal(rule, one, asked.get(one.field)) for one in LIMITED)
    return next((why for why in found if why), "")


def option_refusal(rule: Rule, option: Option, asked: Any) -> str:
    """Why a rule does not permit the value of an option, and what to do; empty if it does."""
    limit = option.limit
    if limit is None or asked is None:
        return ""
    permitted = getattr(rule, limit.key)
    if isinstance(permitted, tuple):
        words = [word for word in str(asked).split(",") if word not in permitted]
        texts = {"permitted": listed(permitted), "first": next(iter(permitted), "")}
        return limit.refusal.format(asked=words[0], **texts) if words else ""
    if permitted is None or asked <= permitted:
        return ""
    text = limit.none if permitted == 0 and limit.none else limit.refusal
    return text.format(asked=asked, most=permitted)


def _counted(config: Config, allocation: Allocation) -> int:
    """The most virtual functions that Slurm has counted for a job on one of its nodes."""
    name = config.placement.vf_gres
    counts = (sum(gres.count for gres in node.gres if gres.name == name) for node in allocation.nodes)
    return max(counts, default=0)
