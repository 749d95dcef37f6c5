# SPDX-License-Identifier: Apache-2.0
"""A vhpcd process on a simulated fabric, for tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from controller_lab import HAVE_MUNGED, Munged, allocation, manifest, publish, request, stop, wait_for
from fabric_lab import HAVE_SIMULATOR, SimulatedFabric, sets, simulated_fabric
from fabric_lab import NEEDED as NEEDED_HERE
from vhpcd_process import Vhpcd, make

from vhpc_slurm.config.fabric import Fabric
from vhpc_slurm.controller.store.keys import read_snapshot
from vhpc_slurm.model import Generation, Lease, Timeline

HAVE_ALL = HAVE_MUNGED and HAVE_SIMULATOR
NEEDED = f"needs munged (apt install munge), and {NEEDED_HERE}"


@pytest.fixture(name="fabric")
def fabric_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedFabric]:
    """A simulated fabric for one test."""
    folder = tmp_path / "fabric"
    folder.mkdir()
    monkeypatch.chdir(folder)
    with simulated_fabric(folder) as started:
        yield started


@contextmanager
def a_vhpcd(
    folder: Path,
    daemon: Munged,
    fabric: SimulatedFabric | None,
    prepare: Callable[[Vhpcd], None] = lambda _: None,
    /,
    **other: Any,
) -> Iterator[Vhpcd]:
    """It runs; without a fabric it has no backend.  ``prepare`` is called before its start."""
    reconcile_s, timeout_s = other.pop("reconcile_s", 0.5), other.pop("request_timeout_s", 30)
    settings: dict[str, Any] = {"sweep_interval_s": 0.0, "audit_interval_s": 0.3}
    library: dict[str, str] = {}
    if fabric is not None:
        settings |= {
            "backend": "opensm-file",
            "pkey_last": 0x10FF,
            "partitions": str(fabric.partitions),
            "opensm_pidfile": str(fabric.pidfile),
            "opensm_log": str(fabric.log),
            "apply_timeout_s": 5,
        }
        library = {name: value for name, value in fabric.environment.items() if name not in os.environ}
    found = make(
        folder,
        daemon,
        Fabric(**settings | other),
        reconcile_interval_s=reconcile_s,
        request_timeout_s=timeout_s,
        database=None,
        **library,
    )
    publish(folder / "catalog", manifest(min_memory_mib=1))
    prepare(found)
    try:
        yield found.start()
    finally:
        if found.process is not None:
            stop(found.process)


def opened(vhpcd: Vhpcd, job_id: int, *nodes: str) -> Lease:
    return vhpcd.client.open_generation(request(job_id), allocation(*nodes or ("n1",)))


def states(vhpcd: Vhpcd) -> dict[int, str]:
    snapshot = read_snapshot(vhpcd.config.controller.database)
    return {assignment.generation.job_id: assignment.state.value for assignment in snapshot.assignments}


def carries(fabric: SimulatedFabric, expected: dict[int, set[int]]) -> None:
    wait_for(lambda: sets(fabric) == expected, f"the fabric does not become {expected}")


@dataclass(frozen=True)
class Ack:
    generation: Generation
    node: str
    clean: bool = True
    note: str = ""
    timeline: Timeline | None = None
