# SPDX-License-Identifier: Apache-2.0
"""UDP ports of job networks: any user with a process on the node can take one before the kernel does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vhpc_slurm.errors import FabricError, NodeError

_SOCKETS = (Path("/proc/thread-self/net/udp"), Path("/proc/thread-self/net/udp6"))
_IN_USE = "Address already in use"
"""What iproute2 prints for EADDRINUSE."""


@contextmanager
def opening(port: int) -> Iterator[None]:
    """For commands that make the kernel listen on a port.

    Raises:
        FabricError: a program has the port. So the job is requeued, and the node is not drained, which a
            user could cause at will otherwise.
    """
    try:
        yield
    except NodeError as err:
        if _IN_USE not in err.line():
            raise
        whose = ", ".join(str(uid) for uid in sorted(owners(port))) or "unknown"
        raise FabricError(
            f"UDP port {port} of this node is in use, so the job has no network",
            f"by a program of uid {whose}",
            f"find it with: ss -ulnp 'sport = :{port}'",
        ) from err


def owners(port: int) -> set[int]:
    """Uids of the sockets that have a UDP port, in this thread's network namespace (proc(5), net/udp)."""
    found = set()
    for path in _SOCKETS:
        try:
            lines = path.read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue  # a kernel without IPv6
        for line in lines:
            words = line.split()
            if int(words[1].rpartition(":")[2], 16) == port:
                found.add(int(words[7]))
    return found
