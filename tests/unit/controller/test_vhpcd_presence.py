# SPDX-License-Identifier: Apache-2.0
"""Connections of followers to a real vhpcd: there is always one, which tells that the node is there."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from controller_lab import allocation, request
from vhpcd_process import Vhpcd

from pace import until
from vhpc_slurm.model import Generation

ESTABLISHED, TIME_WAIT = "01", "06"
"""As in /proc/net/tcp (include/net/tcp_states.h)."""
KEEPALIVE_TIMER = "02"
"""As there, in the column ``tr`` (networking/proc_net_tcp in the kernel's documents)."""


def states(vhpcd: Vhpcd) -> Counter[str]:
    """States of the clients' ends of all connections to this vhpcd."""
    port = f":{vhpcd.config.controller.port:04X}"
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    return Counter(row[3] for row in rows if row[2].endswith(port))


def test_a_connection_stays_until_the_next_question(vhpcd: Vhpcd) -> None:
    client = vhpcd.client
    generation = client.open_generation(request(1), allocation("n1")).generation
    assert states(vhpcd)[ESTABLISHED] == 0, "other connections end with their answer"
    for _ in range(3):
        assert client.roster(generation, "n1", 0, (), 0.0).over, "the job is in no cluster"
        until(lambda: states(vhpcd)[ESTABLISHED] == 1, f"one connection in {states(vhpcd)}")
    assert states(vhpcd)[TIME_WAIT] == 0, "vhpcd closes first: a node has few ports below 1024"
    del client
    until(lambda: states(vhpcd)[ESTABLISHED] == 0, "the connection of a process that has ended")


def test_the_kernels_of_both_ends_look_after_a_connection(vhpcd: Vhpcd) -> None:
    client = vhpcd.client
    generation = client.open_generation(request(1), allocation("n1")).generation
    client.roster(generation, "n1", 0, (), 0.0)
    port = f":{vhpcd.config.controller.port:04X}"
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    ends = [row for row in rows if row[3] == ESTABLISHED and (row[1] + row[2]).count(port)]
    assert [row[5][:2] for row in ends] == [KEEPALIVE_TIMER] * 2, ends


def test_questions_that_are_refused_leave_one_connection(vhpcd: Vhpcd) -> None:
    client = vhpcd.client
    client.open_generation(request(1), allocation("n1"))
    for _ in range(3):
        client.roster(Generation(9, 0, "0123abcd"), "n1", 0, (), 0.0)
    until(lambda: states(vhpcd)[ESTABLISHED] == 1, f"one connection in {states(vhpcd)}")


def test_a_vhpcd_that_stops_closes_it(vhpcd: Vhpcd) -> None:
    client = vhpcd.client
    generation = client.open_generation(request(1), allocation("n1")).generation
    client.roster(generation, "n1", 0, (), 0.0)
    assert vhpcd.stop() == 0
    vhpcd.start()
    client.roster(generation, "n1", 0, (), 0.0)
    until(lambda: states(vhpcd)[ESTABLISHED] == 1, f"one connection in {states(vhpcd)}")
