# SPDX-License-Identifier: Apache-2.0
"""Ports of adapters that guests see: trees of an HCA, and a subnet manager's keys written into them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster import Lab, vlab_status
from fabric_tables import FULL, rows

from hca_tree import HcaTree


def hca_tree(node: str) -> HcaTree:
    """An empty folder that a guest on that node will take for its sysfs."""
    tree = HcaTree(Path(f"/proc/{vlab_status()['hosts'][node]['pid']}/root/hca/sys"))
    tree.clear()
    return tree


def play(lab: Lab, adapters: dict[tuple[HcaTree, str], int], stop: threading.Event) -> None:
    """Show in the trees what OpenSM writes into the tables of the simulated adapters."""
    while not stop.wait(0.2):
        try:
            now = rows(lab)
        except AssertionError:  # a port did not answer in time
            continue
        for (tree, device), guid in adapters.items():
            tree.set_keys(device, now[guid])
            # no guest here has an IPoIB interface that could get an address; its loopback plays one
            tree.set_interface_key("lo", now[guid][0])
            keyed = any(entry & FULL for entry in now[guid])
            tree.set_state(device, "4: ACTIVE" if keyed else "2: INIT")


@contextmanager
def played(lab: Lab, adapters: dict[tuple[HcaTree, str], int]) -> Iterator[None]:
    for (tree, device), guid in adapters.items():
        tree.add(device, guid, (), "1: DOWN")
        tree.add_interface(device, "lo", 0)
    stop = threading.Event()
    player = threading.Thread(target=play, args=(lab, adapters, stop))
    player.start()
    try:
        yield
    finally:
        stop.set()
        player.join(60)
        for tree, _ in adapters:
            tree.clear()
