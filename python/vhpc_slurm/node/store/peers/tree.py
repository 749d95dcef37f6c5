# SPDX-License-Identifier: Apache-2.0
"""Which nodes of a lease a node asks for blobs: a tree over the nodes in the order of the lease."""
# Decision: Nodes of a lease pass its image on

from __future__ import annotations

from collections.abc import Sequence

FANOUT = 2
"""How many nodes ask one node. All receive at the rate at which one sends, divided by this number, and
each level costs the time of one chunk: two keep half of a node's bandwidth, and 1,000 nodes are nine
levels deep. A chain (one) would keep all of it, but the last of 1,000 nodes would wait for 999 others."""


def ancestors(rank: int) -> tuple[int, ...]:
    """The ranks that a node asks, its parent first, the root of the tree last; empty for the root."""
    found = []
    while rank > 0:
        rank = (rank - 1) // FANOUT
        found.append(rank)
    return tuple(found)


def is_asked(nodes: Sequence[str], own: str) -> bool:
    """Whether a node has children in the tree; half of the nodes have none."""
    return own in nodes and FANOUT * nodes.index(own) + 1 < len(nodes)


def sources(nodes: Sequence[str], own: str) -> tuple[str, ...]:
    """The nodes that a node of a lease asks, in this order; empty if it does not have a part in the lease."""
    return tuple(nodes[rank] for rank in ancestors(nodes.index(own))) if own in nodes else ()
