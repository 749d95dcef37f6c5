# SPDX-License-Identifier: Apache-2.0
"""The architectures of nodes, as their slurmd has told slurmctld: a job gets the image of its nodes'."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from vhpc_slurm.errors import VhpcError
from vhpc_slurm.slurm.port import Slurm

log = logging.getLogger("vhpcd")


class Architectures:
    """Asks Slurm only about nodes that are not known yet: a node keeps its processor."""

    def __init__(self, slurm: Slurm) -> None:
        self._slurm = slurm
        self._known: Mapping[str, str] = {}

    def of(self, nodes: Iterable[str]) -> Mapping[str, str]:
        """The architectures of nodes by their names, without those that Slurm does not tell; may wait."""
        wanted = tuple(nodes)
        if any(node not in self._known for node in wanted):
            try:
                told = {one.name: one.arch for one in self._slurm.node_resources() if one.arch}
            except VhpcError as err:
                log.warning("the architectures of nodes are not known: %s", err.line())
                told = {}
            self._known = {**self._known, **told}
        return {node: self._known[node] for node in wanted if node in self._known}
