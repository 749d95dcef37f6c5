# SPDX-License-Identifier: Apache-2.0
"""Nodes that ask each other for images: the port, and the name of this node."""

from __future__ import annotations

import socket
from collections.abc import Iterator

from vhpc_slurm.cli.host.checks import CheckResult, error, ok, warn
from vhpc_slurm.config import Config
from vhpc_slurm.node.store.peers.process import host_of, listen
from vhpc_slurm.node.store.peers.server import ROOT_PORTS

CHECK = "images.peer_port"


def check(config: Config, node: str, *, root: bool) -> Iterator[CheckResult]:
    """Whether other nodes can reach this one at its port and name; nothing if the site has no port."""
    port, name = config.images.peer_port, host_of(config, node)
    if not port:
        return
    if port >= ROOT_PORTS:
        why = f"any user of a node can take port {port}, and its jobs then read the catalogue"
        yield warn(CHECK, why, f"choose a port below {ROOT_PORTS}")
    try:
        socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as err:
        hint = "correct images.peer_names, or the resolver; it has to work on every node"
        yield error(CHECK, f"the name {name} of this node has no address: {err}", hint)
        return
    try:
        if root:
            listen(port).close()
    except OSError as err:
        hint = f"choose another port on all nodes; see: ss -ltnp 'sport = :{port}'"
        yield error(CHECK, f"port {port} cannot be listened on: {err.strerror or err}", hint)
        return
    yield ok(CHECK, f"other nodes ask {name} for images at port {port}")
