# SPDX-License-Identifier: Apache-2.0
"""Networks of jobs on this node: those of generations without a journal, and those without their firewall."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from vhpc_slurm.errors import NodeError, VhpcError
from vhpc_slurm.model import Generation
from vhpc_slurm.node.network import firewall, forwarding, nat, owned, plan, segment
from vhpc_slurm.node.store import joblock, journal, kinds
from vhpc_slurm.node.store.journal import Entry
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.reconcile import site
from vhpc_slurm.reconcile.finding import Kind, NodeFinding


def audit(layout: Layout) -> Iterator[NodeFinding]:
    """What is wrong with the segments of this node, and with the packet filters of passt.

    The kernel is asked first and the journals afterwards: a boot announces its segment
    in the journal before it makes it.
    """
    yield from _segments(layout)
    yield from _port(layout)
    yield from _nat(layout)
    yield from site.audit(layout)


def _segments(layout: Layout) -> Iterator[NodeFinding]:
    interfaces: dict[Generation | None, list[str]] = {}
    tables: dict[Generation, frozenset[str]] = {}
    copies: frozenset[tuple[str, str]] = frozenset()
    problem: VhpcError | None = None
    try:
        interfaces, tables, copies = segment.held(), firewall.tables(), owned.existing()
    except NodeError as err:
        problem = err
    try:
        known = _announced(layout)
    except VhpcError as err:  # a journal is damaged: it is unknown which generation holds what
        if interfaces or tables:
            yield NodeFinding(Kind.ORPHAN_NETWORK, err.line(), partial(_raise, err))
        return
    if problem is not None:
        if known:
            yield NodeFinding(Kind.ORPHAN_NETWORK, problem.line(), partial(_raise, problem))
        return
    for generation, names in interfaces.items():
        if orphans := [name for name in names if not _is_owned(known, generation, name)]:
            what = f"{', '.join(orphans)} of generation {generation or 'unknown'}, which has no journal"
            repair = partial(_remove, layout, generation, orphans)
            yield NodeFinding(Kind.ORPHAN_NETWORK, f"network interfaces {what}", repair)
    for generation in tables.keys() - known.keys():
        what = f"nftables table {firewall.table_name(generation)} of a generation that has no journal"
        yield NodeFinding(Kind.ORPHAN_NETWORK, what, partial(_remove_tables, layout, generation))
    for generation in known.keys() & interfaces.keys() if firewall.available() else ():
        if joblock.busy(layout, generation.job_id):
            continue  # a hook that is making it, or removing it
        what = f"VNI {known[generation].data['vni']} of generation {generation} has lost"
        if tables.get(generation, frozenset()) != frozenset(firewall.FAMILIES):
            repair = partial(_protect, layout, generation)
            yield NodeFinding(Kind.FIREWALL, f"{what} its nftables tables", repair)
        name = firewall.table_name(generation)
        if not {(family, name) for family in firewall.FAMILIES} <= copies:
            repair = partial(_protect, layout, generation, copy=True)
            yield NodeFinding(Kind.FIREWALL, f"{what} the process that keeps copies of its tables", repair)


def _port(layout: Layout) -> Iterator[NodeFinding]:
    """The node's own table, which protects nodes of jobs that this node has left."""
    ports = firewall.remembered(layout.guarded_ports) if firewall.available() else frozenset()
    if not ports:
        return
    repair = partial(firewall.guard, ports)
    try:
        if not firewall.guards(ports):
            yield NodeFinding(
                Kind.FIREWALL, f"this node has lost its nftables table {firewall.GUARD}", repair
            )
        lacking = forwarding.lacking() if layout.config.network.accept_bridged else ()
    except NodeError as err:
        yield NodeFinding(Kind.FIREWALL, err.line(), partial(_raise, err))
        return
    for chain in lacking:
        what = f"chain {chain} may drop frames of job networks, and has lost the rule that accepts them"
        yield NodeFinding(Kind.FIREWALL, what, forwarding.accept)


def _nat(layout: Layout) -> Iterator[NodeFinding]:
    tables: set[tuple[Generation, int]] = set()
    copies: frozenset[tuple[str, str]] = frozenset()
    problem: VhpcError | None = None
    try:
        tables, copies = nat.tables(), owned.existing()
    except NodeError as err:
        problem = err
    try:
        known = _guarded(layout)
    except VhpcError as err:  # a journal is damaged: it is unknown which generation holds what
        if tables:
            yield NodeFinding(Kind.ORPHAN_NETWORK, err.line(), partial(_raise, err))
        return
    if problem is not None:
        if known:
            yield NodeFinding(Kind.FIREWALL, problem.line(), partial(_raise, problem))
        return
    for generation, index in tables - known.keys():
        what = f"nftables table {nat.table_name(generation, index)} of a generation that has no journal"
        yield NodeFinding(Kind.ORPHAN_NETWORK, what, partial(_remove_guard, layout, generation, index))
    for generation, index in known:
        if joblock.busy(layout, generation.job_id):
            continue  # a hook that is making it, or removing it
        what = f"passt of guest {index} of generation {generation} has lost"
        if (generation, index) not in tables:
            repair = partial(_guard, layout, generation, index)
            yield NodeFinding(Kind.FIREWALL, f"{what} its nftables table", repair)
        if ("inet", nat.table_name(generation, index)) not in copies:
            repair = partial(_guard, layout, generation, index, copy=True)
            yield NodeFinding(Kind.FIREWALL, f"{what} the process that keeps a copy of its table", repair)


def _guarded(layout: Layout) -> dict[tuple[Generation, int], Entry]:
    """Guests with nat that journals have, by generation and index."""
    found = _entries(layout, kinds.NAT)
    return {(generation, int(entry.data["index"])): entry for generation, entry in found}


def _remove_guard(layout: Layout, generation: Generation, index: int) -> None:
    if (generation, index) not in _guarded(layout):
        nat.release(generation, index)


def _guard(layout: Layout, generation: Generation, index: int, *, copy: bool = False) -> None:
    """Make a guest's table again, or its copy, from what the journal has."""
    entry = _guarded(layout).get((generation, index))
    if entry is None:
        return
    found = {key: tuple(entry.data[key]) for key in ("dns", "allow", "deny")}
    rules, gid = nat.Rules(**found, port=int(entry.data["port"])), int(entry.data["gid"])
    if copy:
        nat.hold(generation, index, gid, rules)
    else:
        nat.protect(generation, index, gid, rules)


def _announced(layout: Layout) -> dict[Generation, Entry]:
    """The segments that journals have."""
    return dict(_entries(layout, kinds.NETWORK))


def _entries(layout: Layout, kind: str) -> Iterator[tuple[Generation, Entry]]:
    """Entries of this kind in all journals."""
    for generation in journal.generations(layout.journals):
        for entry in journal.read_entries(layout.journals, generation):
            if entry.kind == kind:
                yield generation, entry


def _is_owned(known: Mapping[Generation, Entry], generation: Generation | None, name: str) -> bool:
    """Whether a journal has an interface; one whose alias is not set yet is known by its VNI."""
    if generation is not None:
        return generation in known
    return plan.vni_of(name) in {entry.data["vni"] for entry in known.values()}


def _remove(layout: Layout, generation: Generation | None, names: Sequence[str]) -> None:
    known = _announced(layout)
    segment.remove([name for name in names if not _is_owned(known, generation, name)])


def _remove_tables(layout: Layout, generation: Generation) -> None:
    if generation not in _announced(layout):
        firewall.remove(generation)


def _protect(layout: Layout, generation: Generation, *, copy: bool = False) -> None:
    """Make the tables again, or their copies, from what the journal has."""
    entry = _announced(layout).get(generation)
    if entry is not None and generation in segment.held():
        make = firewall.hold if copy else firewall.apply
        make(generation, segment.of_entry(entry.data), entry.data["peers"])


def _raise(err: VhpcError) -> None:
    raise err
