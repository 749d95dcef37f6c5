# SPDX-License-Identifier: Apache-2.0
"""Settings of the lab that a benchmark changes while it runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from vhpcbench.common import Lab

CONFIG = "/etc/vhpc/vhpc.toml"
KEPT = f"{CONFIG}.before-bench"
# a copy that is there already is of a benchmark that was killed, so it is the one to put back
KEEP = f"[ -e {KEPT} ] || cp -p {CONFIG} {KEPT}; cp -p {KEPT} {CONFIG}"


@contextmanager
def changed(lab: Lab, hosts: Sequence[str], command: str, *arguments: str) -> Iterator[None]:
    """Change vhpc.toml of hosts by a command that gets its path last; afterwards it is as before."""
    with ExitStack() as undo:
        for host in hosts:
            lab.run(host, "sh", "-c", KEEP)
            undo.callback(lab.run, host, "mv", KEPT, CONFIG)
            lab.run(host, command, *arguments, CONFIG)
        yield
