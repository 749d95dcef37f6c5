# SPDX-License-Identifier: Apache-2.0
"""Usage of jobs: nodes report it to vhpcd, which tells it to the job's owner."""

from __future__ import annotations

import itertools
import json
import os
from functools import partial
from pathlib import Path

import pytest
from controller_lab import HAVE_MUNGED, NOBODY, ChildError, allocation, as_uid, request
from lease_records import put, record
from store_backends import ENGINES, open_at, place
from vhpcd_process import Vhpcd

from vhpc_slurm.cli import options
from vhpc_slurm.cli.jobs import ps
from vhpc_slurm.controller.store.database import SqliteStore
from vhpc_slurm.errors import UserError
from vhpc_slurm.model import FIGURE_MAX, Figures, Generation, GuestUsage, NodeUsage, StepUsage, job_usage
from vhpc_slurm.node.guest import usage as asking
from vhpc_slurm.node.store import usage as stored

needs_munged = pytest.mark.skipif(not HAVE_MUNGED, reason="needs munged: apt install munge")
root = pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user: run as root")
G = Generation(42, 0, "0123abcd")


def guest(index: int = 0, *steps: StepUsage, **whole: int) -> GuestUsage:
    return GuestUsage(index, Figures(**whole), steps, 1 << 20)


# --- sums ----------------------------------------------------------------------------


def test_nodes_and_steps_are_summed() -> None:
    batch = StepUsage("batch", Figures(cpu_us=1, rss_bytes=5, oom_kills=0), 1)
    first = guest(0, batch, StepUsage("10", Figures(cpu_us=10, rss_bytes=9), 2), cpu_us=12, peak_bytes=100)
    second = guest(0, StepUsage("10", Figures(cpu_us=30, rss_bytes=7), 2), cpu_us=31, peak_bytes=50)
    found = job_usage([NodeUsage(G, "n1", (first,)), NodeUsage(G, "n2", (second,))])
    assert found.whole == Figures(cpu_us=43, peak_bytes=150)
    assert found.steps == (batch, StepUsage("10", Figures(cpu_us=40, rss_bytes=9), 4))
    assert (found.guests, found.missing) == (2, ())


def test_a_figure_missing_in_one_guest_is_unknown_for_all() -> None:
    first, second = guest(0, cpu_us=1, peak_bytes=0), guest(1, cpu_us=2)
    dead = GuestUsage(2, missing="the guest had ended")
    found = job_usage([NodeUsage(G, "n1", (first, second, dead))])
    assert found.whole == Figures(cpu_us=3)
    assert (found.guests, found.missing) == (3, (("n1", 2, "the guest had ended"),))
    nothing = job_usage([NodeUsage(G, "n1", (dead,))])
    assert (nothing.whole, nothing.steps) == (Figures(), ())


def test_steps_are_in_the_order_of_sacct() -> None:
    names = ("ssh", "10", "other", "9", "batch")
    steps = tuple(StepUsage(name, Figures(cpu_us=1)) for name in names)
    found = job_usage([NodeUsage(G, "n1", (GuestUsage(0, steps=steps),))])
    assert [step.step for step in found.steps] == ["batch", "9", "10", "other", "ssh"]


def test_liars_cannot_make_a_number_too_large_for_json() -> None:
    liars = [NodeUsage(G, f"n{n}", (guest(0, cpu_us=FIGURE_MAX - 1),)) for n in range(5000)]
    assert job_usage(liars).whole.cpu_us == 2**63 - 1


def test_a_node_reports_a_bounded_number_of_steps() -> None:
    steps = tuple(StepUsage(str(n), Figures(cpu_us=1), 1) for n in range(255))
    whole = GuestUsage(0, steps=(*steps, StepUsage("other", Figures(cpu_us=5), 5)))
    assert asking.folded(whole, 256) == whole
    less = asking.folded(whole, 16)
    assert [step.step for step in less.steps] == [*map(str, range(15)), "other"]
    assert less.steps[-1] == StepUsage("other", Figures(cpu_us=245), 245)


# --- on the node ---------------------------------------------------------------------


def test_figures_of_a_guest_outlive_it(tmp_path: Path) -> None:
    path = tmp_path / "usage" / f"{G}.json"
    assert stored.of_node(path, G, "n1") is None
    gone = "the guest had ended"
    stored.keep(path, [guest(0, cpu_us=7), GuestUsage(1, missing=gone)])
    stored.keep(path, [GuestUsage(0, missing=gone), guest(1, cpu_us=9)])  # a second Epilog
    assert stored.of_node(path, G, "n1") == NodeUsage(G, "n1", (guest(0, cpu_us=7), guest(1, cpu_us=9)))
    path.write_bytes(b'[{"index": "x"')
    assert stored.read(path) == ()


# --- the store -----------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("order", list(itertools.permutations(("n1", "n2", "n3"))))
def test_the_last_report_in_any_order_is_the_last(
    engine: str, order: tuple[str, ...], tmp_path: Path
) -> None:
    store = open_at(place(engine, tmp_path))
    one = record()
    put(store, one)
    g = one.lease.generation
    with store.transaction():
        store.usage.keep(NodeUsage(g, "n5", ()))
    assert not store.usage.complete(g, "n5")  # no node has taken the lease
    found = []
    with store.transaction():
        for node in order:
            store.take(g, node, 1.0)
    for node in order:
        with store.transaction():
            store.usage.keep(NodeUsage(g, node, ()))
        found.append(store.usage.complete(g, node))
    assert found == [False, False, True]
    assert not store.usage.complete(Generation(9, 9, "0" * 8), "n1")
    store.close()


def test_a_report_replaces_an_earlier_one_of_its_node() -> None:
    store = SqliteStore(":memory:")
    one = record()
    put(store, one)
    g = one.lease.generation
    with store.transaction():
        for node in ("n2", "n1"):
            store.take(g, node, 1.0)
        store.usage.keep(NodeUsage(g, "n1", (guest(0, cpu_us=1),)))
        store.usage.keep(NodeUsage(g, "n1", (guest(0, cpu_us=2),)))
        store.usage.keep(NodeUsage(Generation(9, 9, "0" * 8), "n1", ()))  # unknown
        store.usage.keep(NodeUsage(g, "n9", ()))  # it has not taken the lease
    assert store.usage.taken(g) == 2
    assert not store.usage.complete(g, "n9")
    assert store.usage.page(g, "", 100)[0] == NodeUsage(g, "n1", (guest(0, cpu_us=2),))
    assert [row.node for row in store.usage.page(g, "n1", 100)] == ["n9"]
    store.close()


# --- vhpcd ---------------------------------------------------------------------------


@needs_munged
def test_the_last_node_learns_that_the_report_is_complete(vhpcd: Vhpcd) -> None:
    client = vhpcd.client
    lease = client.open_generation(request(), allocation())
    for node in ("n1", "n2"):
        client.lease(42, 0, node, 5.0)
    first = NodeUsage(lease.generation, "n1", (guest(0, cpu_us=3_000_000, peak_bytes=1 << 20),))
    second = NodeUsage(lease.generation, "n2", (GuestUsage(0, missing="the guest had ended"),))
    assert client.report_usage(first) is False
    vhpcd.kill()  # what it has confirmed is on the disk
    vhpcd.start()
    assert client.report_usage(second) is True
    assert client.report_usage(second) is True
    page, nodes = client.usage(42)
    assert nodes == (first, second)
    assert (page.user, page.nodes, page.taken, page.memory_mib) == ("alice", 2, 2, 4096)
    assert page.generation == str(lease.generation)


@needs_munged
def test_reports_of_many_nodes_are_read_in_pages(vhpcd: Vhpcd) -> None:
    client = vhpcd.client
    names = [f"n{number:03}" for number in range(120)]
    lease = client.open_generation(request(), allocation(*names))
    steps = tuple(StepUsage(str(n), Figures(*[2**52] * 8), 2**31) for n in range(200))
    for name in names:
        assert not client.report_usage(NodeUsage(lease.generation, name, (guest(0, *steps, cpu_us=1),)))
    _, nodes = client.usage(42)
    assert [node.node for node in nodes] == names
    assert job_usage(nodes).whole.cpu_us == 120
    (used,) = client.history().used
    assert used.cpu_us == 120


@needs_munged
def test_ps_shows_the_usage_of_ended_jobs(
    vhpcd: Vhpcd, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(options, "config", lambda: vhpcd.config)
    client = vhpcd.client
    lease = client.open_generation(request(), allocation())
    client.open_generation(request(43), allocation())
    cpu_us = (90 * 60 + 1) * 1_000_000
    for node, peak in (("n1", 3 << 30), ("n2", 1 << 30)):
        whole = guest(0, cpu_us=cpu_us, peak_bytes=peak)
        client.report_usage(NodeUsage(lease.generation, node, (whole,)))
    assert ps.ps(everything=True, as_json=True) == 0
    shown = {row["job"]: row["usage"] for row in json.loads(capsys.readouterr().out)}
    assert shown == {42: {"cpu_us": 2 * cpu_us, "peak_bytes": 4 << 30, "so_far": None}, 43: None}
    assert ps.ps(everything=True) == 0
    _, first, second = capsys.readouterr().out.splitlines()
    assert " 03:00:02.00  4.0 GiB  in all " in first
    assert "GiB" not in second


@pytest.mark.promise("attack.user-view")
@root
@needs_munged
def test_users_read_the_usage_of_their_own_jobs(vhpcd: Vhpcd) -> None:
    client = vhpcd.client
    mine = client.open_generation(request(42, uid=NOBODY, user="nobody"), allocation())
    client.report_usage(NodeUsage(mine.generation, "n1", (guest(0, cpu_us=5),)))
    client.open_generation(request(43), allocation())
    assert as_uid(NOBODY, lambda: job_usage(client.usage(42)[1]).whole.cpu_us) == 5
    for other in (43, 44):
        with pytest.raises(ChildError, match=f"vhpcd has no job {other} of yours"):
            as_uid(NOBODY, partial(client.usage, other))
    with pytest.raises(ChildError, match=f"refuses uid {NOBODY}"):
        as_uid(NOBODY, lambda: client.report_usage(NodeUsage(mine.generation, "n1", ())))
    with pytest.raises(UserError, match="vhpcd has no job 44: "):
        client.usage(44)
