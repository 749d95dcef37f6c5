# SPDX-License-Identifier: Apache-2.0
"""This node's part in passing the image on to the other nodes of the lease.

Nothing of this can fail a job: a node that cannot serve or ask reads the catalogue, and those that
would ask it do so, too.
"""

from __future__ import annotations

import logging
import os

from vhpc_slurm.catalog import with_list
from vhpc_slurm.errors import NodeError
from vhpc_slurm.node.boot.state import Boot
from vhpc_slurm.node.host import process
from vhpc_slurm.node.resource.process import Process
from vhpc_slurm.node.store.peers import membership, offers, tree
from vhpc_slurm.node.store.peers.client import Lineage
from vhpc_slurm.node.store.peers.process import listen, start

log = logging.getLogger("vhpc")


def begin(work: Boot) -> Lineage | None:
    """Serve the image to other nodes if they may ask this one; returns the nodes to ask, None if none.

    Raises:
        NodeError: the journal cannot be written.
        Stopped: the job has ended meanwhile.
    """
    config, lease, own = work.layout.config, work.lease, work.plan.node
    nodes, port = lease.allocation.node_names, config.images.peer_port
    if not port or len(nodes) < 2 or own not in nodes:
        return None
    offer = offers.Offer(
        generation=str(lease.generation),
        node=own,
        nodes=nodes,
        owner=work.account.uid if work.image.ref.own else None,
        blobs=with_list(work.image.manifest),
        prolog=(os.getpid(), process.start_time(os.getpid()) or 0),
    )
    if tree.is_asked(nodes, own):
        _serve(work, offer, port)
    return membership.lineage(work.layout, offer, tree.sources(nodes, own))


def _serve(work: Boot, offer: offers.Offer, port: int) -> None:
    generation = str(work.lease.generation)
    try:
        offers.write(work.layout, offer)
        listener = listen(port)
    except OSError as err:
        log.warning("peers: this node does not serve its image: port %d: %s", port, err)
        return
    path = work.layout.job(work.lease.generation.job_id) / "peers.log"
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    with listener:
        key = Process().announce(work.journal, "peers", "peers")
        output = os.open(path, flags, 0o600)
        try:
            ref = start(work.layout.config, listener, generation, output)
        except NodeError as err:
            log.warning("peers: this node does not serve its image: %s", err.line())
            work.journal.released(key)
            return
        finally:
            os.close(output)
        Process().note(work.journal, key, ref)
