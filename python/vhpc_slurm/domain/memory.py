# SPDX-License-Identifier: Apache-2.0
"""How much memory, and what backs it.

memfd needs no hugetlbfs mount and no path permission; virtiofs needs it
shared; no same-page merging between tenants.  ``<locked/>`` stays away: it
lifts QEMU's memlock limit altogether, and huge pages do not swap anyway.
"""

from __future__ import annotations

from vhpc_slurm.domain.spec import DomainSpec
from vhpc_slurm.record import Record

PREALLOC_THREADS_MAX = 16  # QEMU uses no more per memory backend


class MemoryContext(Record, frozen=True):
    """Values of the memory template; ``prealloc_threads`` is 0 where memory is not allocated up front."""

    memory_mib: int
    hugepage_kib: int
    prealloc_threads: int


def context(spec: DomainSpec) -> MemoryContext:
    """Guest memory.

    Huge pages are allocated at once, in parallel, or the start fails.  Memory
    that devices can write to has to be there before the guest runs anyway:
    what VFIO finds missing it allocates page by page, in one thread.
    """
    guest = spec.guest
    at_once = guest.hugepage_kib or guest.devices
    threads = min(PREALLOC_THREADS_MAX, len(guest.pins)) if at_once else 0
    return MemoryContext(guest.memory_mib, guest.hugepage_kib, threads)
