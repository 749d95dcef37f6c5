# SPDX-License-Identifier: Apache-2.0
"""The process that serves the blobs of one generation to other nodes of its lease.

Prolog starts it on nodes that others ask, and ``vhpc image stage`` under ``vhpc image warm``, with a
listening socket and without capabilities: it reads files of the image store, and offers, which belong
to root. It ends by itself when no node has asked for a while; the journal ends it with the job at the
latest, or the command that has started it. Processes of several jobs listen on the same port
(SO_REUSEPORT), and each serves the requests of all jobs of its node.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

import vhpc_slurm
from vhpc_slurm import loglines
from vhpc_slurm.config import Config
from vhpc_slurm.munge import Munge
from vhpc_slurm.node.host import process
from vhpc_slurm.node.host.process import ProcessRef
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.node.store.peers.server import Place, Server, plain

LOG_BYTES = 64 * 1024
LIFETIMES = 3
"""The longest life, in deadlines of a stage: nodes whose Prolog begins later read the catalogue."""
MODULE = "vhpc_slurm.node.store.peers.process"
BACKLOG = 128


def listen(port: int) -> socket.socket:
    """A listening socket on all addresses, in addition to those of other jobs; OSError if there is none."""
    for family in (socket.AF_INET6, socket.AF_INET):
        made = None
        try:
            made = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            made.bind(("", port))
            made.listen(BACKLOG)
        except OSError:
            if made is not None:
                made.close()
            if family == socket.AF_INET:
                raise
            continue
        return made
    raise OSError("no address family")


def start(config: Config, listener: socket.socket, generation: str, log: int) -> ProcessRef:
    """Start the process, which continues when the caller ends.

    Args:
        config: of the node.
        listener: from ``listen``.
        generation: whose process it is.
        log: descriptor for its messages.

    Raises:
        NodeError: it cannot be started.
    """
    with _written(config) as stdin:
        return process.spawn(
            _command(listener),
            generation=generation,
            stderr=log,
            pass_fds=(listener.fileno(),),
            stdin=stdin,
            variables=_variables(),
        )


def start_child(config: Config, listener: socket.socket, log: int) -> subprocess.Popen[bytes]:
    """Start the process for a caller that ends it; arguments as ``start``, OSError if that is impossible."""
    with _written(config) as stdin:
        return subprocess.Popen(
            _command(listener),
            stdin=stdin,
            stdout=log,
            stderr=log,
            cwd="/",
            env={"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", **_variables()},
            pass_fds=(listener.fileno(),),
        )


@contextlib.contextmanager
def _written(config: Config) -> Iterator[int]:
    """A descriptor that the configuration can be read from."""
    stdin = os.memfd_create("vhpc-peers-config")
    try:
        os.write(stdin, msgspec.json.encode(config))
        os.lseek(stdin, 0, os.SEEK_SET)
        yield stdin
    finally:
        os.close(stdin)


def _command(listener: socket.socket) -> list[str]:
    drop = process.drop_to(process.Credentials(0, 0))
    return [*drop, sys.executable, "-P", "-s", "-m", MODULE, str(listener.fileno())]


def _variables() -> dict[str, str]:
    return {"PYTHONPATH": str(Path(vhpc_slurm.__file__).parents[1])}


def host_of(config: Config, node: str) -> str:
    """The name or address at which other nodes reach a node."""
    return config.images.peer_names.replace("{node}", node)


def addresses(config: Config, node: str) -> frozenset[str]:
    """The addresses from which a node may ask: those of its name here, and of its name in Slurm."""
    found: set[str] = set()
    for name in {host_of(config, node), node}:
        with contextlib.suppress(OSError, UnicodeError):
            places = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
            found.update(plain(str(place[0])) for *_, place in places)
    return frozenset(found)


def main(argv: Sequence[str]) -> int:
    """Serve; the configuration is on standard input, ``argv`` has the descriptor of the socket."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (LOG_BYTES, LOG_BYTES))
    loglines.to_stderr("%(asctime)s %(message)s")
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=Config)
    server = Server(Munge(config.controller.munge_socket))
    listener = socket.socket(fileno=int(argv[0]))
    server.add(listener, Place(Layout(config), lambda node: addresses(config, node)))
    deadline_s = float(config.guests.stage_timeout_s)
    server.run(idle_s=deadline_s, most_s=LIFETIMES * deadline_s)
    os._exit(0)  # a check that waits for munged or a resolver must not keep the process


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
