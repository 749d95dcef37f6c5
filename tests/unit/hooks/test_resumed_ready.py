# SPDX-License-Identifier: Apache-2.0
"""A resumed job: on its first node the plugin is told that the batch script continues in the guest."""

from __future__ import annotations

from dataclasses import replace

import pytest
from boot_rig import boot_layout
from prolog_rig import Node, prolog_node
from stepd import needs_root

from vhpc_slurm.model import Allocation, Generation, NodeAllocation, Resume

layout, node = boot_layout, prolog_node
pytestmark = needs_root
RESUME = Resume(7, "ck", Generation(41, 0, "89abcdef"), (), bytes(32))


@pytest.mark.parametrize(
    ("first", "resume", "attach"), [("n1", RESUME, "batch"), ("n0", RESUME, None), ("n1", None, None)]
)
def test_the_batch_script_is_attached_on_the_first_node(
    node: Node, first: str, resume: Resume | None, attach: str | None
) -> None:
    own = node.lease.allocation.nodes[0]
    nodes = (own,) if first == "n1" else (NodeAllocation(first, (0,), 1024), own)
    node.lease = replace(node.lease, resume=resume, allocation=Allocation(nodes))
    assert node.run() == 0
    assert node.state["status"] == "ready"
    assert node.state.get("attach") == attach
