# SPDX-License-Identifier: Apache-2.0
"""A node's part in passing an image on: whom it asks, and how it serves without a job of its own."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import subprocess
from collections.abc import Iterator, Sequence

from vhpc_slurm.munge import Munge
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.node.store.peers import offers
from vhpc_slurm.node.store.peers.client import Lineage
from vhpc_slurm.node.store.peers.offers import Offer
from vhpc_slurm.node.store.peers.process import host_of, listen, start_child

LOG = "warming.log"
log = logging.getLogger("vhpc")


def lineage(layout: Layout, offer: Offer, sources: Sequence[str]) -> Lineage:
    """The data that a node needs to ask others.

    Args:
        layout: of the node.
        offer: what it offers itself.
        sources: the nodes to ask, in this order.
    """
    config = layout.config
    return Lineage(
        generation=offer.generation,
        own=offer.node,
        sources=tuple(sources),
        host=functools.partial(host_of, config),
        port=config.images.peer_port,
        seal=Munge(config.controller.munge_socket),
        withdraw=functools.partial(_withdraw, layout, offer),
    )


@contextlib.contextmanager
def serving(layout: Layout, offer: Offer) -> Iterator[bool]:
    """Serve an offer of a run of ``vhpc image warm`` meanwhile; yields whether this node does."""
    child = None
    try:
        child = _served(layout, offer)
        yield child is not None
    finally:
        with contextlib.suppress(OSError):
            offers.end(layout, offer.generation)
        if child is not None:
            child.kill()
            child.wait()


def _served(layout: Layout, offer: Offer) -> subprocess.Popen[bytes] | None:
    port = layout.config.images.peer_port
    if not port:
        return None
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        offers.write(layout, offer)
        layout.log.mkdir(mode=0o755, parents=True, exist_ok=True)
        with listen(port) as listener, os.fdopen(os.open(layout.log / LOG, flags, 0o600), "wb") as output:
            return start_child(layout.config, listener, output.fileno())
    except OSError as err:
        log.warning("peers: this node does not serve its image: port %d: %s", port, err)
        return None


def _withdraw(layout: Layout, offer: Offer, sha256: str) -> None:
    with contextlib.suppress(OSError):
        offers.withdraw(layout, offer, sha256)
