# SPDX-License-Identifier: Apache-2.0
"""vhpcd's store in SQLite and in MariaDB, by turns, on the same disk.

Needs no lab, but a MariaDB server: `make deps`. Every commit is on the disk in both: SQLite with
synchronous=FULL, MariaDB with innodb_flush_log_at_trx_commit=1, on a Unix socket of the same host. The
files are in /var/tmp.

A start is one lease from request to READY, without a fabric, each waiting for its own commit. Nodes take
and acknowledge the lease of a job on 1,000 nodes at the same time, as they do when it starts and ends;
their calls share commits. Reads are of that lease, as a node asks for it. The target: the nodes of the
large job take it within a second in MariaDB too.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from controller_lab import Alone, allocation, identity, request
from mariadb_server import HAVE_SERVER, WHY_NOT, Server
from store_backends import ME

from vhpc_slurm.controller.store.database import SqliteStore
from vhpc_slurm.controller.store.mariastore import MariaStore
from vhpc_slurm.controller.store.sqlstore import SqlStore
from vhpc_slurm.controller.store.writer import Writer
from vhpc_slurm.fabric.backend import NoNetwork
from vhpcbench.common import BenchError, Report, main
from vhpcbench.targets import at_most

STARTS = 20
NODES = 1000
READS = 200
TARGETS = (at_most(1000, f"{NODES:,} nodes take a lease in MariaDB", "ms"),)


def run() -> int:
    """Entry point."""
    return main("store", __doc__ or "", 5, bench)


class Engine:
    """A vhpcd's leases in one engine; jobs are numbered on."""

    def __init__(self, store: SqlStore) -> None:
        self.store = store
        self.service = Alone(store, NoNetwork(), reserve_mib=0)
        self.writer = Writer(store)
        self.job = 0
        self.nodes = [f"n{number}" for number in range(NODES)]
        self.large = 0

    def starts(self) -> float:
        """Milliseconds of one start."""
        nodes = allocation("n1", "n2")
        began = time.perf_counter()
        for _ in range(STARTS):
            self.job += 1
            self.writer.submit(self.service.open, request(self.job), nodes, identity(0)).result()
        return (time.perf_counter() - began) * 1000 / STARTS

    def takes(self) -> float:
        """Milliseconds until all nodes have taken the lease of a large job."""
        self.job += 1
        self.large = self.job
        self.writer.submit(
            self.service.open, request(self.large), allocation(*self.nodes), identity(0)
        ).result()
        return self._all(lambda node: self.service.take(self.large, 0, node))

    def acknowledges(self) -> float:
        """Milliseconds until all nodes have acknowledged its end."""
        self.writer.submit(self.service.end, self.large, 0).result()
        (record,) = self.store.of_job(self.large)
        generation = record.lease.generation
        return self._all(
            lambda node: self.service.acknowledge(generation, node, clean=True, note="", timeline=None)
        )

    def reads(self) -> float:
        """Milliseconds of one read."""
        began = time.perf_counter()
        for _ in range(READS):
            self.writer.submit(self.store.newest, self.large).result()
        return (time.perf_counter() - began) * 1000 / READS

    def _all(self, call: Callable[[str], object]) -> float:
        began = time.perf_counter()
        for waiting in [self.writer.submit(call, node) for node in self.nodes]:
            waiting.result()
        return (time.perf_counter() - began) * 1000

    def close(self) -> None:
        """End its thread and connection."""
        self.writer.close()
        self.store.close()


FIGURES: dict[str, Callable[[Engine], float]] = {
    "a start": Engine.starts,
    f"{NODES} nodes take a lease": Engine.takes,
    "one read of it": Engine.reads,
    f"{NODES} nodes acknowledge its end": Engine.acknowledges,
}


def bench(args: argparse.Namespace) -> Report:
    """All figures of both engines by turns."""
    if not HAVE_SERVER:
        raise BenchError(WHY_NOT)
    report = Report("store")
    with tempfile.TemporaryDirectory(prefix="bench-store-", dir="/var/tmp") as folder:
        server = Server(Path(folder)).start()
        try:
            engines = {
                "SQLite": Engine(SqliteStore(Path(folder) / "leases.sqlite")),
                "MariaDB": Engine(MariaStore(server.database(), ME)),
            }
            _measure(report, engines, args.rounds)
            for engine in engines.values():
                engine.close()
        finally:
            server.stop()
    return report


def _measure(report: Report, engines: dict[str, Engine], rounds: int) -> None:
    found: dict[str, dict[str, list[float]]] = {what: {name: [] for name in engines} for what in FIGURES}
    for turn in range(rounds + 1):
        for what, measure in FIGURES.items():
            for name, engine in engines.items():
                value = measure(engine)
                if turn:  # the first finds cold caches
                    found[what][name].append(value)
    for what, values in found.items():
        for name in engines:
            report.add(f"{what}, {name}", "ms", values[name])
        report.ratios[f"{what}, MariaDB to SQLite"] = statistics.median(
            ours / theirs for ours, theirs in zip(values["MariaDB"], values["SQLite"], strict=True)
        )
    slowest = statistics.median(found[f"{NODES} nodes take a lease"]["MariaDB"])
    report.judge(TARGETS[0], slowest)


if __name__ == "__main__":
    raise SystemExit(run())
