# SPDX-License-Identifier: Apache-2.0
"""An allocation split into several guests: whole cores each, and within a NUMA cell where possible."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vhpc_slurm.errors import UserError, VhpcError
from vhpc_slurm.model import HostCpu


def split_cpus(
    chosen: Sequence[HostCpu], guests: int, reasons: list[VhpcError]
) -> tuple[tuple[tuple[HostCpu, ...], ...], list[str]]:
    """CPUs of each guest, in abstract order.

    Cores are divided as evenly as they can be.  Each cell first takes the
    guests that fit into it whole; those that are left share what is left.

    Args:
        chosen: the job's CPUs in abstract order.
        guests: how many guests.
        reasons: gets the reason against it; the result is empty then.

    Returns:
        CPUs by guest, and notes.
    """
    if guests == 1:
        return (tuple(chosen),), []
    cores: dict[int, list[HostCpu]] = {}
    for cpu in chosen:
        cores.setdefault(cpu.core, []).append(cpu)
    if guests < 1 or guests > len(cores):
        reasons.append(_cannot(guests, len(cores)))
        return (), []
    least, more = divmod(len(cores), guests)
    by_cell: dict[int, list[int]] = {}
    for core, cpus in cores.items():
        by_cell.setdefault(cpus[0].cell, []).append(core)
    sizes = [least + 1] * more + [least] * (guests - more)
    whole: list[list[int]] = []
    rest: list[int] = []
    for members, fitting in zip(by_cell.values(), _fitting(by_cell, least, more, guests), strict=True):
        left = members
        for size in fitting:
            whole.append(left[:size])
            left = left[size:]
            sizes.remove(size)
        rest += left
    spread = len(sizes)
    for size in sizes:
        whole.append(rest[:size])
        rest = rest[size:]
    order = {core: place for place, core in enumerate(cores)}
    whole.sort(key=lambda part: min(order[core] for core in part))
    notes = []
    if more:
        notes.append(f"{len(cores)} cores on {guests} guests: {more} have one core more than the others")
    if spread:
        notes.append(f"{spread} of {guests} guests span NUMA cells: the job's cores leave no other way")
    parts = tuple(
        tuple(cpu for core in sorted(part, key=order.__getitem__) for cpu in cores[core]) for part in whole
    )
    return parts, notes


def _fitting(by_cell: Mapping[int, Sequence[int]], least: int, more: int, guests: int) -> list[list[int]]:
    """Sizes of the guests that each cell takes whole: as many in all as can be, large ones rather.

    ``best`` maps a number of larger guests already placed to the most smaller
    ones that go with it, and to how the cells were filled.
    """
    best: dict[int, tuple[int, list[tuple[int, int]]]] = {0: (0, [])}
    for members in by_cell.values():
        following: dict[int, tuple[int, list[tuple[int, int]]]] = {}
        for placed, (smaller, filled) in best.items():
            for larger in range(min(more - placed, len(members) // (least + 1)) + 1):
                room = (len(members) - larger * (least + 1)) // least
                here = min(room, guests - more - smaller)
                if following.get(placed + larger, (-1, []))[0] < smaller + here:
                    following[placed + larger] = smaller + here, [*filled, (larger, here)]
        best = following
    _, (_, filled) = max(best.items(), key=lambda item: (item[0] + item[1][0], item[0]))
    return [[least + 1] * larger + [least] * smaller for larger, smaller in filled]


def _cannot(guests: int, cores: int) -> UserError:
    return UserError(
        f"--vhpc-guests-per-node={guests} is not possible",
        f"the job has {cores} cores on a node, and a guest needs a whole one",
        f"ask for at most {cores} guests, or for more cores",
    )


def share(total: int, weights: Sequence[int]) -> list[int]:
    """``total`` things in proportion to weights: whole ones, all of them, larger remainders first."""
    parts = [total * weight // sum(weights) for weight in weights]
    left = total - sum(parts)
    remainders = sorted(range(len(weights)), key=lambda at: (-(total * weights[at] % sum(weights)), at))
    for at in remainders[:left]:
        parts[at] += 1
    return parts
