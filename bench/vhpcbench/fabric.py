# SPDX-License-Identifier: Apache-2.0
"""Leases with partition keys: vhpcd with munge on fabrics of ibsim and OpenSM, against the bare steps.

Needs no lab, but opensm, ibsim and munged: `make deps`.

lease to READY: from a client's request for a lease, until the answer that it is
READY. The reference is what no way to do it could leave out: the new file
renamed into place, SIGHUP, OpenSM's word that the subnet is up, and one reading
of all ports, after which the job's must have the key. Nothing of that is
durable, while vhpcd waits for the disk three times. The target is 1.3 times. With
256 and 1024 adapters, the target is also 1.2 times the sweep alone: the same
without the reading of the ports.

vhpcd restores a file that another program changes, so it is stopped (SIGSTOP)
while the reference writes the file, and has audited the fabric before its turn.

The ports of the simulated fabric answer within microseconds, so both are
shorter than on hardware, and what vhpcd adds weighs more.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from controller_lab import Munged, allocation, identity, munged, request
from fabric_lab import DEFAULT, Shape, SimulatedFabric, simulated_fabric, tree
from vhpcd_fabric import a_vhpcd, opened, states
from vhpcd_process import Vhpcd

from vhpc_slurm.config import Config, Guests
from vhpc_slurm.controller.api import protocol as wire
from vhpc_slurm.controller.leases import layer
from vhpc_slurm.controller.store.database import SqliteStore
from vhpc_slurm.fabric import partitions
from vhpc_slurm.fabric.backend import NoNetwork
from vhpc_slurm.fabric.keys import KeyAssignment, KeyState
from vhpc_slurm.fabric.numbers import KeyPool
from vhpc_slurm.fabric.opensm import FIRST_POLL_S
from vhpc_slurm.fabric.partitions import IbPartition
from vhpc_slurm.fabric.smp import FabricReader
from vhpc_slurm.munge import Munge
from vhpcbench import sealed
from vhpcbench.common import CHECKOUT, BenchError, Report, main
from vhpcbench.targets import at_least, at_most

PORTS = {16: 4, 256: 16, 1024: 16}
"""Ports of a job on a fabric of so many adapters."""
NODES = 1000
BARE = {size: at_most(1.3, f"lease to bare, {size} adapters") for size in PORTS}
SWEEP = {size: at_most(1.2, f"lease to the sweep alone, {size} adapters") for size in (256, 1024)}
"""Of large fabrics, whose sweep is longer than the waits for the disk."""
BURSTS = {what: at_most(3, f"100 {what} at once", "sweeps") for what in ("starts", "ends")}
STATIC = at_most(0, "4 starts with a static pool", "sweeps")
READS = at_least(500, "lease reads on one core", "a second")
SERVED = at_most(3, f"a lease to {NODES:,} nodes", "s")
TARGETS = (*BARE.values(), *SWEEP.values(), *BURSTS.values(), STATIC, READS, SERVED)
GENERATIONS = 10_000
LIMIT_S = 60.0


def run() -> int:
    """Entry point."""
    os.environ["PYTHONPATH"] = str(CHECKOUT / "python")  # for the processes that it starts
    return main("fabric", __doc__ or "", 9, bench, _options)


def _options(parser: argparse.ArgumentParser) -> None:
    sizes = ",".join(map(str, PORTS))
    parser.add_argument("--adapters", default=sizes, help=f"sizes of the fabrics (default {sizes})")


def bench(args: argparse.Namespace) -> Report:
    """All figures."""
    report = Report("fabric")
    sizes = [int(size) for size in args.adapters.split(",")]
    if not PORTS.keys() >= set(sizes):
        raise BenchError(f"--adapters: the sizes are {', '.join(map(str, PORTS))}")
    with munged() as daemon:
        for adapters in sizes:
            with _fabric(adapters) as fabric:
                _ready(report, daemon, fabric, PORTS[adapters], args.rounds)
                if adapters == 16:
                    _bursts(report, daemon, fabric)
        _reads(report, daemon, args.rounds)
        _large_store(report, daemon)
    return report


# --- lease to READY -------------------------------------------------------------------------------


@contextmanager
def _fabric(adapters: int) -> Iterator[SimulatedFabric]:
    before = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="bench-fabric-") as folder:
        os.chdir(folder)  # the simulator's library makes folders where it runs
        try:
            with simulated_fabric(Path(folder), Shape() if adapters == 16 else tree(adapters)) as fabric:
                yield fabric
        finally:
            os.chdir(before)


@dataclass(frozen=True)
class Bare:
    """Milliseconds of the least that has to be done: until the subnet was up, and with the ports read."""

    sweep: float
    whole: float


def _ready(report: Report, daemon: Munged, fabric: SimulatedFabric, ports: int, rounds: int) -> None:
    """Both by turns on one fabric; the last key of it is the reference's."""
    guids = fabric.shape.guids
    last = 0x1000 + len(guids) // ports - 1
    reader = FabricReader(environment=fabric.environment)
    reader.scan(LIMIT_S)
    ours: list[float] = []
    theirs: list[Bare] = []
    nodes = [f"n{number}" for number in range(ports)]
    settings = {"pkey_last": last - 1, "quarantine_s": 0, "audit_interval_s": 300, "apply_timeout_s": 30}
    with _vhpcd(daemon, fabric, **settings) as vhpcd:
        _settled(vhpcd)
        for turn in range(rounds + 1):
            with _stopped(vhpcd):
                theirs.append(_bare(fabric, reader, last, guids[-ports:]))
                since = time.time()
            _settled(vhpcd, since)  # the reference has swept, so that vhpcd audits the fabric
            began = time.perf_counter()
            opened(vhpcd, turn + 1, *nodes)
            ours.append((time.perf_counter() - began) * 1000)
            vhpcd.client.ending(turn + 1, 0)
            _until(lambda: not set(states(vhpcd).values()) - {"quarantine"})
            _settled(vhpcd, time.time())
    reader.close()
    # The first of each finds cold caches.
    _judged(report, len(guids), ours[1:], theirs[1:])


def _judged(report: Report, adapters: int, ours: list[float], theirs: list[Bare]) -> None:
    """Add the figures of one fabric."""
    of = f"{adapters} adapters"
    mine = report.add(f"lease to READY, {of}", "ms", ours)
    whole = report.add(f"rename, HUP, readback, {of}", "ms", [one.whole for one in theirs])
    sweep = report.add(f"the sweep alone of it, {of}", "ms", [one.sweep for one in theirs])
    to_whole, to_sweep = mine.median / whole.median, mine.median / sweep.median
    report.ratios[f"lease to bare, {of}"] = to_whole
    report.ratios[f"lease to sweep alone, {of}"] = to_sweep
    report.judge(BARE[adapters], to_whole)
    if adapters in SWEEP:
        report.judge(SWEEP[adapters], to_sweep)


@contextmanager
def _stopped(vhpcd: Vhpcd) -> Iterator[None]:
    """vhpcd does not run in this block: it would restore the file that the reference changes."""
    assert vhpcd.process is not None
    pid = vhpcd.process.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        os.waitid(os.P_PID, pid, os.WSTOPPED)
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def _bare(fabric: SimulatedFabric, reader: FabricReader, pkey: int, guids: tuple[int, ...]) -> Bare:
    """The least that has to be done; all is as before at the end."""
    old = fabric.partitions.read_bytes()
    one = IbPartition("bare", pkey, tuple((f"{guid:#018x}", True) for guid in guids), ("indx0", "ipoib"))
    new = partitions.render((*partitions.parse(old), one), *(partitions.origin(old) or (0, "")))
    began = time.perf_counter()
    _swap(fabric, new)
    swept = time.perf_counter()
    tables = reader.scan(LIMIT_S).tables()
    spent = Bare((swept - began) * 1000, (time.perf_counter() - began) * 1000)
    if any(set(tables[guid]) != {0x7FFF, 0x8000 | pkey} for guid in guids):
        raise BenchError("the reference's ports do not have its key")
    _swap(fabric, old)
    return spent


def _swap(fabric: SimulatedFabric, data: bytes) -> None:
    """Rename, SIGHUP, SUBNET UP."""
    before = fabric.sweeps()
    fabric.replace(data)
    fabric.opensm.send_signal(signal.SIGHUP)
    deadline = time.monotonic() + LIMIT_S
    while fabric.sweeps() == before:
        if time.monotonic() > deadline:
            raise BenchError("OpenSM does not sweep")
        time.sleep(FIRST_POLL_S)  # as often as vhpcd looks


@contextmanager
def _vhpcd(daemon: Munged, fabric: SimulatedFabric | None, **settings: Any) -> Iterator[Vhpcd]:
    with (
        tempfile.TemporaryDirectory(prefix="bench-vhpcd-") as folder,
        a_vhpcd(Path(folder), daemon, fabric, reconcile_s=60.0, **settings) as vhpcd,
    ):
        yield vhpcd


def _settled(vhpcd: Vhpcd, since: float = 0.0) -> None:
    """The auditor has looked, and will not look again soon."""
    _until(lambda: (vhpcd.client.status().fabric.audited or -1.0) > since)


def _until(done: object) -> None:
    assert callable(done)
    deadline = time.monotonic() + LIMIT_S
    while not done():
        if time.monotonic() > deadline:
            raise BenchError("the fabric or vhpcd does not get on")
        time.sleep(0.02)


# --- sweeps ---------------------------------------------------------------------------------------


def _bursts(report: Report, daemon: Munged, fabric: SimulatedFabric) -> None:
    """Sweeps of a hundred jobs that begin and end at once, as clients of their own."""
    jobs = range(1, 101)
    fabric.replace(DEFAULT)
    fabric.sweep()
    with _vhpcd(daemon, fabric, sweep_interval_s=2.0, audit_interval_s=300) as vhpcd:
        _settled(vhpcd)
        with ThreadPoolExecutor(100) as hooks:
            for what, target in BURSTS.items():
                before, began = fabric.sweeps(), time.perf_counter()
                if what == "starts":
                    list(hooks.map(lambda job: opened(vhpcd, job), jobs))
                else:
                    list(hooks.map(lambda job: vhpcd.client.ending(job, 0), jobs))
                    _until(lambda: set(states(vhpcd).values()) == {"quarantine"})
                sweeps = fabric.sweeps() - before
                report.add(f"100 {what} at once, until all are done", "s", [time.perf_counter() - began])
                report.add(f"100 {what} at once, sweeps", "", [sweeps])
                report.judge(target, sweeps)
    pool = partitions.of_pool(KeyPool(0x1000, 0x1003), ranks=4, rails=1, vfs=1)
    fabric.replace(partitions.render(pool, 0))
    fabric.sweep()
    with _vhpcd(
        daemon, fabric, backend="static-pool", pkey_last=0x1003, pool_guests=4, quarantine_s=0
    ) as vhpcd:
        before = fabric.sweeps()
        for job in range(1, 5):
            opened(vhpcd, job)
        sweeps = fabric.sweeps() - before
    report.add("4 starts with a static pool, sweeps", "", [sweeps])
    report.judge(STATIC, sweeps)


# --- reads ----------------------------------------------------------------------------------------


def _reads(report: Report, daemon: Munged, rounds: int) -> None:
    """Reads per second of a vhpcd and a munged on one core, and a job of a thousand nodes."""
    cores = sorted(os.sched_getaffinity(0))
    rates, bare, served = [], [], []
    names = tuple(f"node{number:04}" for number in range(NODES))
    with _vhpcd(daemon, None) as vhpcd:
        assert vhpcd.process is not None
        for pid in (vhpcd.process.pid, daemon.process.pid):
            for task in Path(f"/proc/{pid}/task").iterdir():
                os.sched_setaffinity(int(task.name), {cores[0]})
        os.sched_setaffinity(0, set(cores[1:]) or {cores[0]})
        try:
            opened(vhpcd, 1, "n1", "n2", "n3", "n4")
            for turn in range(rounds):
                look = [
                    sealed.frame(vhpcd, wire.GetLease(job_id=1, restart=0, node="n1", wait_s=0))
                    for _ in range(NODES)
                ]
                rates.append(NODES / asyncio.run(_ask_all(vhpcd, look, 32)))
                bare.append(_munge_alone(vhpcd.munge()))
                job = 100 + turn
                opened(vhpcd, job, *names)
                takes = [
                    sealed.frame(vhpcd, wire.GetLease(job_id=job, restart=0, node=name, wait_s=30.0))
                    for name in names
                ]
                served.append(asyncio.run(_ask_all(vhpcd, takes, NODES)))
                vhpcd.client.ending(job, 0)
        finally:
            os.sched_setaffinity(0, set(cores))
    reads = report.add("lease reads, vhpcd and munged on one core", "1/s", rates)
    report.add("munge alone: a credential read and one written", "1/s", bare)
    report.ratios["lease reads to munge alone"] = statistics.median(
        ours / theirs for ours, theirs in zip(rates, bare, strict=True)
    )
    slow = report.add(f"a lease to {NODES} nodes that ask at once", "s", served)
    report.judge(READS, reads.median)
    report.judge(SERVED, slow.median)


async def _ask_all(vhpcd: Vhpcd, frames: list[bytes], at_once: int) -> float:
    """Seconds until all are answered; answers are received whole, and the last is read."""
    began = time.perf_counter()
    answers = await sealed.ask_all(vhpcd, frames, at_once, LIMIT_S)
    spent = time.perf_counter() - began
    answer = sealed.opened(vhpcd, answers[-1])
    if not isinstance(answer, wire.LeaseAnswer):
        raise BenchError(f"vhpcd did not answer with a lease but {answer}")
    return spent


def _munge_alone(munge: Munge) -> float:
    """What one client could have of munged at best, both on their cores."""
    payload = b"x" * 1000
    began = time.perf_counter()
    for _ in range(200):
        munge.decode(munge.encode(payload, ttl_s=wire.TTL_S))
    return 200 / (time.perf_counter() - began)


# --- a large store --------------------------------------------------------------------------------


def _large_store(report: Report, daemon: Munged) -> None:
    """Memory and disk of ten thousand generations with keys, and what a request costs then."""
    with tempfile.TemporaryDirectory(prefix="bench-vhpcd-") as folder:
        state = Path(folder) / "state"
        state.mkdir()
        database = state / "leases.sqlite"
        store = SqliteStore(database)
        leases = layer.build(store, NoNetwork(), Config(guests=Guests(memory_reserve_mib=0)))
        nodes = allocation(*(f"n{number}" for number in range(4)))
        with store.transaction():
            for job in range(1, GENERATIONS + 1):
                generation = leases.opening.reserve(request(job), nodes, identity(0)).lease.generation
                assignment = KeyAssignment(
                    generation, 0x0FFF + job, f"job {generation}", 0, 4, 1, 1, KeyState.ACTIVE
                )
                store.keys.add(assignment)
        store.close()
        report.add("store of 10,000 generations", "MiB", [database.stat().st_size / 2**20])
        with a_vhpcd(Path(folder), daemon, None, reconcile_s=60.0) as vhpcd:
            assert vhpcd.process is not None
            vhpcd.client.leases()
            began = time.perf_counter()
            opened(vhpcd, GENERATIONS + 1)
            report.add("a start beside 10,000 generations", "ms", [(time.perf_counter() - began) * 1000])
            pages = int(Path(f"/proc/{vhpcd.process.pid}/statm").read_text().split()[1])
            memory = pages * resource.getpagesize() / 2**20
            report.add("memory of vhpcd with 10,000 generations", "MiB", [memory])


if __name__ == "__main__":
    raise SystemExit(run())
