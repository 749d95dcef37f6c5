# SPDX-License-Identifier: Apache-2.0
"""Which pages guest memory consists of: by the site's policy, and by what the pools have.

The rounding rule: memory of a guest is whole pages of whole guest cells; what
is left over stays outside the guest.  Where that is not wanted
(``placement.rounding = strict``) such a job fails and is told what to ask for.
"""

from __future__ import annotations

from collections.abc import Sequence

from vhpc_slurm.config import Config
from vhpc_slurm.errors import NodeError, UserError, VhpcError
from vhpc_slurm.model import HostCpu, HostInventory
from vhpc_slurm.placement.input import PlanInput
from vhpc_slurm.placement.memory import (
    GRAIN_MIB,
    MemoryPlacement,
    MemorySize,
    check_size,
    lay_out,
)
from vhpc_slurm.placement.split import share
from vhpc_slurm.record import Record

SIZES_KIB = {"2M": 2048, "512M": 524288, "1G": 1048576}
BY_ITSELF = ("1G", "2M")
"""Sizes that ``auto`` tries, the largest first. Of these a kernel with pages of 64 KiB has only 2M; it tries
512M, too."""
LOSS_MOST = 16
"""With ``auto``, pages that would leave more than a sixteenth of a guest's memory outside are too large."""


class Backing(Record, frozen=True):
    """Memory of each guest, in pages of one size; 0 KiB for ordinary ones."""

    page_kib: int
    guests: tuple[MemoryPlacement, ...]
    notes: tuple[str, ...] = ()


def back(
    parts: Sequence[Sequence[HostCpu]],
    size: MemorySize,
    what: PlanInput,
    config: Config,
    reasons: list[VhpcError],
) -> Backing | None:
    """Memory of each guest in pages that its cells have.

    Args:
        parts: CPUs of each guest.
        size: memory of them all.
        what: has the pools, and what other guests were promised of them.
        config: the site's policy.
        reasons: gets all reasons against it; the result is None then.
    """
    policy = config.placement.hugepages
    shares, host = share(size.guests_mib, [len(part) for part in parts]), what.host
    wanted = _sizes(host) if policy == "auto" else (policy,) if policy != "none" else ()
    notes: list[str] = []
    for name in wanted:
        kib = SIZES_KIB[name]
        found = _with(kib, parts, shares, host)
        sizes = [guest.memory_mib for guest in found]
        errors = check_size(what, sizes, size.reserve_mib, kib // 1024)
        errors += _shortages(kib, found, what)
        lost = sum(shares) - sum(sizes)
        if policy != "auto":
            if config.placement.rounding == "strict" and lost:
                errors.append(_unrounded(kib, len(parts), lost, what))
            reasons += errors
            return None if errors else Backing(kib, found)
        if not errors and lost * LOSS_MOST <= sum(shares):
            return Backing(kib, found)
        why = errors[0].what if errors else f"{lost} MiB would be lost to rounding"
        notes.append(f"no {name} pages: {why}")
    found = _with(0, parts, shares, host)
    sizes = [guest.memory_mib for guest in found]
    errors = check_size(what, sizes, size.reserve_mib)
    reasons += errors
    return None if errors else Backing(0, found, tuple(notes))


def _sizes(host: HostInventory) -> tuple[str, ...]:
    """The sizes that ``auto`` tries on a host, largest first."""
    there = {kib for cell in host.cells for kib, _, _ in cell.hugepages}
    if SIZES_KIB["512M"] in there and SIZES_KIB["1G"] not in there:
        return ("512M", "2M")
    return BY_ITSELF


def _with(
    kib: int, parts: Sequence[Sequence[HostCpu]], shares: Sequence[int], host: HostInventory
) -> tuple[MemoryPlacement, ...]:
    """Memory of each guest in pages of one size, whether there are as many or not."""
    grain = kib // 1024 if kib else GRAIN_MIB
    sizes = [mib // grain * grain for mib in shares]
    return tuple(lay_out(part, mib, grain, host) for part, mib in zip(parts, sizes, strict=True))


def _shortages(kib: int, guests: Sequence[MemoryPlacement], what: PlanInput) -> list[VhpcError]:
    """An error for each cell whose pool has too few pages.

    Pages that a guest has not touched yet are still free to the kernel, so
    what was promised counts too.
    """
    needed: dict[int, int] = {}
    for guest in guests:
        for cell in guest.cells:
            pages = cell.memory_mib * 1024 // kib
            needed[cell.host_cell] = needed.get(cell.host_cell, 0) + pages
    errors: list[VhpcError] = []
    for there in what.host.cells:
        wanted = needed.get(there.cell, 0)
        total, free = next(((total, free) for size, total, free in there.hugepages if size == kib), (0, 0))
        left = max(0, min(free, total - what.usage.pages.get((there.cell, kib), 0)))
        if wanted > left:
            errors.append(
                NodeError(
                    f"{wanted} pages of {kib} KiB are needed in NUMA cell {there.cell} of {what.host.node}",
                    f"its pool has {total}, {free} of them free, {left} of them not reserved by other jobs",
                    f"see /sys/devices/system/node/node{there.cell}/hugepages/hugepages-{kib}kB",
                )
            )
    return errors


def _unrounded(kib: int, guests: int, lost: int, what: PlanInput) -> UserError:
    step = kib // 1024 * guests
    below = what.allocation.memory_mib - lost
    return UserError(
        f"memory for guests on {what.host.node} is not a multiple of {step} MiB",
        f"{guests} guests in pages of {kib} KiB would leave {lost} MiB of the job's unused",
        f"ask for --mem={below}M or --mem={below + step}M",
    )
