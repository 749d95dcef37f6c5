# SPDX-License-Identifier: Apache-2.0
"""Guests on the site's bridge: taps and tables of generations without a journal, and lost tables."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from vhpc_slurm.errors import NodeError, VhpcError
from vhpc_slurm.model import Generation
from vhpc_slurm.node.network import owned, site
from vhpc_slurm.node.store import joblock, journal, kinds
from vhpc_slurm.node.store.journal import Entry
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.reconcile.finding import Kind, NodeFinding


def audit(layout: Layout) -> Iterator[NodeFinding]:
    """What is wrong with this node's taps on the site's bridge; the kernel is asked before the journals."""
    taps: dict[str, str] = {}
    tables: set[tuple[Generation, int]] = set()
    copies: frozenset[tuple[str, str]] = frozenset()
    problem: VhpcError | None = None
    try:
        taps, tables, copies = dict(site.taps()), site.tables(), owned.existing()
    except NodeError as err:
        problem = err
    try:
        known = _announced(layout)
    except VhpcError as err:  # a journal is damaged: it is unknown which generation holds what
        if taps or tables:
            yield NodeFinding(Kind.ORPHAN_NETWORK, err.line(), partial(_raise, err))
        return
    if problem is not None:
        if known:
            yield NodeFinding(Kind.FIREWALL, problem.line(), partial(_raise, problem))
        return
    for tap in taps.keys() - {str(entry.data["tap"]) for entry in known.values()}:
        what = f"network interface {tap} of generation {taps[tap] or 'unknown'}, which has no journal"
        yield NodeFinding(Kind.ORPHAN_NETWORK, what, partial(_remove, layout, tap))
    for generation, index in tables - known.keys():
        what = f"nftables table {site.table_name(generation, index)} of a generation that has no journal"
        yield NodeFinding(Kind.ORPHAN_NETWORK, what, partial(_remove_table, layout, generation, index))
    for (generation, index), entry in known.items():
        if entry.data["tap"] not in taps or joblock.busy(layout, generation.job_id):
            continue  # a hook that is making it, or removing it
        what = f"the tap of guest {index} of generation {generation} has lost"
        if (generation, index) not in tables:
            repair = partial(_protect, layout, generation, index)
            yield NodeFinding(Kind.FIREWALL, f"{what} its nftables table", repair)
        if ("bridge", site.table_name(generation, index)) not in copies:
            repair = partial(_protect, layout, generation, index, copy=True)
            yield NodeFinding(Kind.FIREWALL, f"{what} the process that keeps a copy of its table", repair)


def _announced(layout: Layout) -> dict[tuple[Generation, int], Entry]:
    """Guests on the site's bridge that journals have, by generation and index."""
    return {
        (generation, int(entry.data["index"])): entry
        for generation in journal.generations(layout.journals)
        for entry in journal.read_entries(layout.journals, generation)
        if entry.kind == kinds.SITE
    }


def _remove(layout: Layout, tap: str) -> None:
    if tap not in {str(entry.data["tap"]) for entry in _announced(layout).values()}:
        site.remove(tap)


def _remove_table(layout: Layout, generation: Generation, index: int) -> None:
    if (generation, index) not in _announced(layout):
        site.release(generation, index, "")


def _protect(layout: Layout, generation: Generation, index: int, *, copy: bool = False) -> None:
    """Make a guest's table again, or its copy, from what the journal has."""
    entry = _announced(layout).get((generation, index))
    if entry is not None:
        make = site.hold if copy else site.protect
        make(generation, index, site.Port(entry.data["tap"], entry.data["mac"], entry.data["ipv4"]))


def _raise(err: VhpcError) -> None:
    raise err
