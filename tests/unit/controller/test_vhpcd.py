# SPDX-License-Identifier: Apache-2.0
"""vhpcd as a process, its client, and a real munged between them."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from controller_lab import (
    HAVE_MUNGED,
    Alone,
    Munged,
    allocation,
    identity,
    manifest,
    publish,
    request,
    stop,
    wait_for,
)
from vhpcd_fabric import Ack
from vhpcd_process import SOURCES, Vhpcd, frame_of, make

from vhpc_slurm.cli.host.checks import Level, services
from vhpc_slurm.config import Config
from vhpc_slurm.controller.api import protocol as wire
from vhpc_slurm.controller.assembly import assemble
from vhpc_slurm.controller.client import ControllerClient
from vhpc_slurm.controller.leases.reconcile import Patience
from vhpc_slurm.controller.store.database import SqliteStore
from vhpc_slurm.errors import FabricError
from vhpc_slurm.fabric.backend import NoNetwork
from vhpc_slurm.model import Allocation, Generation, ImageRef, LeaseState, NodeAllocation, Stage, Timeline
from vhpc_slurm.slurm import connect

pytestmark = pytest.mark.skipif(not HAVE_MUNGED, reason="needs munged: apt install munge")
root = pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user: run as root")


@pytest.fixture
def stopped(tmp_path: Path, daemon: Munged) -> Iterator[Vhpcd]:
    found = make(tmp_path, daemon)
    yield found
    if found.process is not None:
        stop(found.process)


@pytest.fixture
def vhpcd(stopped: Vhpcd) -> Vhpcd:
    return stopped.start()


def test_a_look_at_a_lease_is_as_short_for_any_number_of_nodes(vhpcd: Vhpcd) -> None:
    sizes: list[int] = []
    for job, count in ((1, 2), (2, 2000)):
        names = [f"node{number}" for number in range(count - 1)]
        vhpcd.client.open_generation(request(job), allocation(*names, "n1"))
        for brief in (True, False):
            look = wire.GetLease(job_id=job, restart=0, node="n1", wait_s=0, brief=brief)
            answer = vhpcd.tell(wire.wrap("request", f"{len(sizes):032x}", look))
            sizes.append(len(msgspec.json.encode(answer)))
    assert sizes[2] == sizes[0]
    assert sizes[3] > sizes[1] + 2000 * len("node1")


# --- the life of a job ---------------------------------------------------------------


def test_the_life_of_a_job(vhpcd: Vhpcd) -> None:
    client = vhpcd.client
    lease = client.open_generation(request(), allocation())
    assert lease.state is LeaseState.READY
    assert (lease.request, lease.allocation) == (request(), allocation())
    assert lease.image is not None
    assert lease.image.manifest == manifest()
    assert client.open_generation(request(), allocation()) == lease
    for node in ("n1", "n2"):
        assert client.lease(42, 0, node, 5.0) == lease
    client.ending(42, 0)
    assert client.lease(42, 0, "n1", 0).state is LeaseState.ENDING
    look = client.look(42, 0, "n1")
    assert (look.generation, look.state, look.request) == (lease.generation, LeaseState.ENDING, request())
    assert (look.image, look.allocation.node_names) == (lease.image, ())
    line = Timeline(lease.generation, "n1", (Stage("plan", 1.0, 2.0, "é"),))
    for node, timeline in (("n1", line), ("n2", None)):
        client.acknowledge(Ack(lease.generation, node, timeline=timeline))
    (record,) = client.leases()
    assert record.lease.state is LeaseState.RELEASED
    assert record.acknowledged == record.taken == ("n1", "n2")
    assert record.timelines == (line,)
    later = replace(line, stages=(*line.stages, Stage("release", 3.0, 4.0)))
    client.report_timeline(later)
    assert client.leases(job_id=42)[0].timelines == (later,)
    assert client.leases(live=True) == []


def test_doctor_shows_node_alarms_one_line_for_each_cause(vhpcd: Vhpcd) -> None:
    for job in (42, 43):
        lease = vhpcd.client.open_generation(request(job), allocation())
        vhpcd.client.acknowledge(Ack(lease.generation, "n2", note="alarm: QEMU says no"))
    found = [finding for finding in services.vhpcd(vhpcd.config, listener=True) if finding.check == "alarms"]
    assert [finding.level for finding in found] == [Level.WARN]
    assert "guests of 2 jobs were refused on n2, last of job 43 0.0 h ago: QEMU says no" in found[0].what


@pytest.mark.promise("image.same", "attack.image-swap")
def test_a_moved_name_does_not_move_the_lease(vhpcd: Vhpcd) -> None:
    first = vhpcd.client.open_generation(request(), allocation())
    digest = publish(vhpcd.folder / "catalog", replace(manifest(), description="newer"))
    assert vhpcd.client.open_generation(request(), allocation()) == first
    assert vhpcd.client.lease(42, 0, "n1", 1.0) == first
    second = vhpcd.client.open_generation(request(43), allocation())
    assert second.image is not None
    assert second.image.digest == digest


def test_user_errors_of_image_and_memory_reach_the_user(vhpcd: Vhpcd) -> None:
    refused = vhpcd.client.open_generation(request(image=ImageRef("nix")), allocation())
    assert refused.state is LeaseState.REFUSED
    assert "nix" in refused.refusal
    assert vhpcd.client.lease(42, None, "n1", 1.0) == refused
    small = vhpcd.client.open_generation(request(43), allocation("n1", memory_mib=400))
    assert "needs 256 MiB of memory: the job has 400 MiB on n1" in small.refusal


def test_a_node_that_asks_early_gets_the_lease_when_it_is_ready(vhpcd: Vhpcd) -> None:
    with ThreadPoolExecutor(20) as nodes:
        waiting = [nodes.submit(vhpcd.client.lease, 42, 0, f"n{n}", 120.0) for n in range(1, 21)]
        time.sleep(0.7)
        assert not any(one.done() for one in waiting)
        began = time.monotonic()
        lease = vhpcd.client.open_generation(request(), allocation(*(f"n{n}" for n in range(1, 21))))
        assert {one.result().generation for one in waiting} == {lease.generation}
        assert time.monotonic() - began < 60.0


def test_waiting_ends_at_the_deadline_with_a_reason(vhpcd: Vhpcd) -> None:
    began = time.monotonic()
    with pytest.raises(FabricError, match=r"no lease of job 7 became ready within 0\.5 s"):
        vhpcd.client.lease(7, 0, "n1", 0.5)
    assert 0.4 < time.monotonic() - began < 20.0
    with pytest.raises(FabricError, match="no lease of job 7"):
        vhpcd.client.lease(7, 0, "n1", 0)


def test_waiting_ends_when_the_job_ends(vhpcd: Vhpcd) -> None:
    vhpcd.client.open_generation(request(), allocation())
    vhpcd.client.ending(42, None)
    with pytest.raises(FabricError, match="has ended"):
        vhpcd.client.lease(42, 0, "n1", 10.0)


def test_clients_that_go_away_while_they_wait_are_forgotten(vhpcd: Vhpcd) -> None:
    ask = wire.wrap("request", "a" * 32, wire.GetLease(job_id=7, restart=0, node="n1", wait_s=60.0))
    with socket.create_connection(("127.0.0.1", vhpcd.config.controller.port)) as link:
        link.sendall(frame_of(vhpcd.munge().encode(ask)))
        wait_for(lambda: vhpcd.client.status().connections == 2, "it never waited")
    wait_for(lambda: vhpcd.client.status().connections == 1, "it is still waited for")


def test_a_large_job_and_many_leases_fit(vhpcd: Vhpcd) -> None:
    names = [f"node{number:04}" for number in range(2000)]
    cores = [tuple(range(number % 7, 256, 2)) for number in range(2000)]
    big = Allocation(tuple(NodeAllocation(n, c, 500000) for n, c in zip(names, cores, strict=True)))
    assert vhpcd.client.open_generation(request(1), big).allocation == big
    for job_id in range(2, 6):
        vhpcd.client.open_generation(request(job_id), big)
    assert [record.lease.request.job_id for record in vhpcd.client.leases()] == [1, 2, 3, 4, 5]


def test_requests_of_one_job_at_the_same_time_make_one_lease(vhpcd: Vhpcd) -> None:
    with ThreadPoolExecutor(8) as hooks:
        found = list(hooks.map(lambda _: vhpcd.client.open_generation(request(), allocation()), range(8)))
    assert len({lease.generation for lease in found}) == 1
    assert len(vhpcd.client.leases()) == 1


def test_status(vhpcd: Vhpcd) -> None:
    vhpcd.client.open_generation(request(), allocation())
    status = vhpcd.client.status()
    assert abs(status.time - time.time()) < 5
    assert status.database == vhpcd.config.controller.database
    assert status.leases["ready"] == 1


# --- starting and stopping -----------------------------------------------------------------


def test_a_client_without_vhpcd_gives_up_at_its_deadline(stopped: Vhpcd) -> None:
    client = ControllerClient(replace_controller(stopped.config, request_timeout_s=1))
    began = time.monotonic()
    with pytest.raises(FabricError, match=r"does not answer.*tried for 1 s.*systemctl status vhpcd"):
        client.status()
    # shortest pauses: 0.025 + 0.05 + 0.1 + 0.2 s, and the next, of up to 0.8 s, could pass the deadline
    assert 0.3 < time.monotonic() - began < 20.0


def replace_controller(config: Config, **other: Any) -> Config:
    return msgspec.structs.replace(config, controller=msgspec.structs.replace(config.controller, **other))


def test_a_client_outlives_a_restart_of_vhpcd(stopped: Vhpcd) -> None:
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(stopped.client.status)
        time.sleep(0.5)
        stopped.start()
        assert asked.result().version


@pytest.mark.promise("db.durable")
def test_leases_and_waiting_nodes_survive_a_restart(vhpcd: Vhpcd) -> None:
    lease = vhpcd.client.open_generation(request(), allocation())
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(vhpcd.client.lease, 43, 0, "n1", 30.0)
        time.sleep(0.3)
        assert vhpcd.stop() == 0
        vhpcd.start()
        assert vhpcd.client.lease(42, 0, "n1", 1.0) == lease
        assert (
            vhpcd.client.open_generation(request(43), allocation()).generation == waiting.result().generation
        )
    vhpcd.kill()
    vhpcd.start()
    assert vhpcd.client.leases()[0].taken == ("n1",)
    assert vhpcd.client.open_generation(request(), allocation()) == lease


def reported(vhpcd: Vhpcd, generation: Generation) -> tuple[str, ...]:
    return vhpcd.client.ready(generation, "n2", "waiting", about=("n1",)).reported


def test_the_ready_barrier_survives_a_restart(vhpcd: Vhpcd) -> None:
    generation = vhpcd.client.open_generation(request(), allocation()).generation
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(vhpcd.client.ready, generation, "n1", "passed", wait_s=60.0)
        wait_for(lambda: reported(vhpcd, generation) == ("n1",), "n1 never said that it is ready")
        vhpcd.kill()
        vhpcd.start()
        state = vhpcd.client.ready(generation, "n2", "waiting", about=("n1",))
        assert (state.missing, state.reported, state.over) == (1, ("n1",), False)
        assert vhpcd.client.ready(generation, "n2", "passed").missing == 0
        assert first.result(60).missing == 0


def test_a_second_vhpcd_on_the_same_database_does_not_start(vhpcd: Vhpcd) -> None:
    second = vhpcd.spawn()
    _, said = second.communicate(timeout=60)
    assert second.returncode == 1
    assert vhpcd.process is not None
    assert said.splitlines()[-1] == (
        f"vhpcd: another vhpcd uses {vhpcd.config.controller.database}: it is process {vhpcd.process.pid}"
    )
    assert vhpcd.client.status()


def test_sigterm_ends_it_cleanly_while_clients_wait(vhpcd: Vhpcd) -> None:
    ask = wire.wrap("request", "a" * 32, wire.GetLease(job_id=7, restart=0, node="n1", wait_s=60.0))
    with socket.create_connection(("127.0.0.1", vhpcd.config.controller.port)) as link:
        link.sendall(frame_of(vhpcd.munge().encode(ask)))
        wait_for(lambda: vhpcd.client.status().connections == 2, "it never waited")
        assert vhpcd.process is not None
        log = vhpcd.folder / "log"
        vhpcd.process.terminate()
        assert vhpcd.process.wait(60) == 0
        assert "Traceback" not in log.read_text()
        vhpcd.process = None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"munge_socket": "/nonexistent/munge"}, "is munged running?"),
        ({"slurm_user": "no-such-user"}, "there is no user 'no-such-user': controller.slurm_user"),
        ({"user": "no-such-user"}, "there is no user 'no-such-user': controller.user"),
        ({"listen": "192.0.2.1"}, "cannot listen on 192.0.2.1"),
        ({"database": "/proc/vhpc/leases"}, "vhpcd cannot use /proc/vhpc/leases"),
    ],
)
def test_a_failed_start_is_one_line(stopped: Vhpcd, change: dict[str, str], said: str) -> None:
    path = stopped.folder / "vhpc.toml"
    ((key, value),) = change.items()
    lines = [
        f'{key} = "{value}"' if line.startswith(f"{key} =") else line
        for line in path.read_text().splitlines()
    ]
    path.write_text("\n".join(lines))
    process = stopped.spawn()
    _, words = process.communicate(timeout=60)
    assert process.returncode == 1
    assert said in words.splitlines()[-1]
    assert "Traceback" not in words


def test_the_version_is_printed() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "vhpc_slurm.controller.server", "--version"],
        env={"PYTHONPATH": SOURCES},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("vhpcd ")


# --- reconciling -----------------------------------------------------------------------------


@pytest.mark.promise("clock.step")
def test_reconciliation_ends_and_requeues_as_slurm_says(stopped: Vhpcd) -> None:
    now = time.time()
    service = Alone(SqliteStore(":memory:"), NoNetwork(), reserve_mib=256, clock=lambda: now - 3600)
    for job_id in (1, 2, 3, 4, 5):
        service.open(request(job_id), allocation(), identity())
    service.take(2, 0, "n1")
    for node in ("n1", "n2"):
        record = service.take(5, 0, node)
        assert record is not None
        service.report(Timeline(record.lease.generation, node, (Stage("agent", now - 99, now - 90),)))
    service.open(request(6), allocation(), identity())
    service.end(6, 0)
    (stopped.folder / "squeue.out").write_text(
        f"1 RUNNING 0 {int(now) - 9} None\n"
        f"3 COMPLETING 0 {int(now) - 99} None\n"
        f"4 RUNNING 0 {int(now) - 5000} Prolog\n"
        f"5 RUNNING 0 {int(now) - 100} Prolog\n"
        f"9 RUNNING 0 {int(now) - 5000} Prolog\n"
        f"6 RUNNING 0 {int(now) - 3601} None\n"
    )
    (stopped.folder / "bin/scontrol").write_text(f'#!/bin/sh\necho "$*" >> {stopped.folder}/calls\n')

    asyncio.run(one_round(stopped, service, after_s=44.0))
    assert "requeue" not in (stopped.folder / "calls").read_text(), "the wall clock may have been set"
    asyncio.run(one_round(stopped, service, after_s=1200.0))
    states = {record.lease.request.job_id: record.lease.state for _, record in service.store.page(0)}
    assert states == {
        1: LeaseState.READY,
        2: LeaseState.ENDING,
        3: LeaseState.RELEASED,
        4: LeaseState.READY,
        5: LeaseState.READY,
        6: LeaseState.RELEASED,
    }
    calls = (stopped.folder / "calls").read_text()
    assert "requeue 4\n" in calls
    assert "requeue 5\n" in calls
    assert "requeue 6\n" in calls
    assert "requeue 9\n" not in calls, "a job that never had a lease is none of ours"

    (stopped.folder / "bin/squeue").write_text(
        "#!/bin/sh\necho 'Unable to contact slurm controller' >&2; exit 1\n"
    )
    with pytest.raises(FabricError, match="Unable to contact"):
        asyncio.run(one_round(stopped, service))
    assert service.look(1, 0).lease.state is LeaseState.READY, "no answer is no answer"  # type: ignore[union-attr]


@pytest.mark.promise("slurm.private-data")
def test_a_lease_survives_one_job_list_without_its_job(
    stopped: Vhpcd, caplog: pytest.LogCaptureFixture
) -> None:
    """As squeue's is for a user from whom PrivateData hides jobs: it is empty, and the exit status is 0."""
    now = time.time()
    service = Alone(SqliteStore(":memory:"), NoNetwork(), reserve_mib=256, clock=lambda: now - 3600)
    for job_id in (1, 2):
        service.open(request(job_id), allocation(), identity())
    (stopped.folder / "squeue.out").write_text("")
    (stopped.folder / "unlisted").write_text("1 \n")
    (stopped.folder / "scontrol.out").write_text("")
    asyncio.run(one_round(stopped, service))
    states = {record.lease.request.job_id: record.lease.state for _, record in service.store.page(0)}
    assert states == {1: LeaseState.READY, 2: LeaseState.RELEASED}
    assert "job 1 was not listed by Slurm, which has it" in caplog.text


async def one_round(stopped: Vhpcd, service: Alone, after_s: float = 0.0) -> None:
    """A pass; with ``after_s`` a second one after so many seconds."""
    vhpcd = assemble(stopped.config, service.leases, NoNetwork(), connect(stopped.config))
    now = [0.0]
    vhpcd.reconciler.patience = Patience(lambda: now[0])
    try:
        await vhpcd.reconciler.run()
        if after_s:
            now[0] = after_s
            await vhpcd.reconciler.run()
    finally:
        vhpcd.close()
