# SPDX-License-Identifier: Apache-2.0
"""A small node and a job on it, and stand-ins for libvirt and a guest's helper processes.

The journal, the image store, uids, plans and domains are real; only processes are not started.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
import pytest
from node_rig import publish

from vhpc_slurm.config import Config
from vhpc_slurm.errors import NodeError, UserError
from vhpc_slurm.model import (
    Allocation,
    Generation,
    HostCell,
    HostCpu,
    HostInventory,
    ImageIdentity,
    ImageRef,
    JobRequest,
    Lease,
    LeaseState,
    NodeAllocation,
    RunningNode,
    Segment,
    Share,
)
from vhpc_slurm.node.boot import agent, reserve, sequence, start
from vhpc_slurm.node.boot.state import Boot
from vhpc_slurm.node.guest import channel as guest_channel
from vhpc_slurm.node.guest.answers import GuestInfo
from vhpc_slurm.node.guest.channel import ChannelError
from vhpc_slurm.node.guest.libvirtd import Hypervisor
from vhpc_slurm.node.host.accounts import Account
from vhpc_slurm.node.host.cgroup import Cgroup
from vhpc_slurm.node.host.confine import DisturbedError
from vhpc_slurm.node.host.process import ProcessRef
from vhpc_slurm.node.store.journal import Journal
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.node.store.timeline import Recorder

T = TypeVar("T")
GENERATION = Generation(42, 0, "0123abcd")
USER = Account("alice", 2001, 2001, "Alice", "/home/alice", "/bin/sh", ())
SHARES = (Share("workdir0", "/scratch/a", read_only=False, why="workdir"),)
NODE = HostInventory(
    node="n1",
    cpu_vendor="GenuineIntel",
    cpus=tuple(HostCpu(cpu, cpu, 0, 0) for cpu in range(4)),
    cells=(HostCell(0, 8192, (0, 1, 2, 3), ((0, 10),)),),
    abstract=(0, 1, 2, 3),
    kvm=False,
    kvm_reason="guests.accelerator = tcg",
    arch="x86_64",
)


@pytest.fixture(name="layout")
def boot_layout() -> Iterator[Layout]:
    """A node's folders under a path that is short enough for sockets."""
    folder = Path(tempfile.mkdtemp(prefix="vb-", dir="/tmp"))
    raw = {
        "paths": {name: str(folder / name) for name in ("state", "run", "log")},
        "images": {"catalog": str(folder / "catalog"), "store": str(folder / "store")},
        "disks": {"folder": str(folder / "disks"), "max_mib": 1024, "keep_free_mib": 0},
        "placement": {"gpu_map": str(folder / "gpu.map")},
        "guests": {
            "uid_base": 4_100_000,
            "uid_count": 8,
            "uid_check_paths": [],
            "qemu_group": "daemon",
            "memory_reserve_mib": 512,
        },
    }
    yield Layout(msgspec.convert(raw, Config))
    shutil.rmtree(folder)


def lease(
    image: ImageIdentity,
    *,
    guests: int = 1,
    uid: int = 2001,
    segment: Segment | None = None,
    nat: bool = False,
    site: bool = False,
    **more: Any,
) -> Lease:
    """A job with the whole node."""
    request = JobRequest(
        42, 0, uid, uid, "alice", "/scratch/a", ImageRef("tiny", "1"), guests_per_node=guests, **more
    )
    part = NodeAllocation("n1", (0, 1, 2, 3), 4096)
    given: dict[str, Any] = {"segment": segment, "nat": nat, "site": site}
    return Lease(GENERATION, LeaseState.READY, request, Allocation((part,)), image, **given)


@dataclass
class RecordingHypervisor:
    """libvirt as the boot sees it: notes the domains, and starts none."""

    domains: list[str] = field(default_factory=list)
    error: NodeError | UserError | None = None
    alive: bool = True

    def version(self) -> tuple[int, int]:
        return 11_003_000, 10_000_000

    def create(self, xml: str, _timeout_s: float, _watch: Callable[[], None]) -> None:
        self.domains.append(xml)
        if self.error is not None:
            raise self.error

    def running(self, _name: str) -> bool:
        return self.alive


@dataclass
class StillHelpers:
    """Helper processes of one guest that are not started; the tests put errors in."""

    disturbance: DisturbedError | None = None
    shim_error: NodeError | None = None
    hung_up: bool = False
    exhaustion: UserError | None = None
    closed: bool = False
    absent: bool = False
    wanted: tuple[Share, ...] = ()
    with_locks: tuple[Share, ...] = ()
    shim: ProcessRef | None = None
    share_daemons: tuple[ProcessRef, ...] = ()

    def start_daemons(self, wanted: Sequence[Share]) -> None:
        self.wanted = tuple(wanted)

    def served(self) -> tuple[Share, ...]:
        return () if self.absent else self.wanted

    def start_locks(self, served: Sequence[Share]) -> None:
        self.with_locks = tuple(served)

    def start_passt(self, _command: Sequence[str]) -> None:
        pass

    def start_shim(self, _agent: object) -> None:
        if self.shim_error is not None:
            raise self.shim_error

    def disturbed(self, ending_s: float = 1.0) -> DisturbedError | None:
        del ending_s
        return self.disturbance

    def exhausted(self) -> UserError | None:
        return self.exhaustion

    def left_by_guest(self) -> bool:
        return self.hung_up

    def ended(self) -> NodeError | None:
        return None

    def close(self) -> None:
        self.closed = True


@dataclass
class BootRig:
    """One boot, reserved and ready to go; ``helpers`` are those of the guests that were started."""

    work: Boot
    hypervisor: RecordingHypervisor
    helpers: list[StillHelpers] = field(default_factory=list)

    def change(self, **what: Any) -> None:
        self.work = replace(self.work, **what)

    def start_helpers(self, *_: object) -> StillHelpers:
        self.helpers.append(StillHelpers())
        return self.helpers[-1]


def prepared(
    layout: Layout,
    monkeypatch: pytest.MonkeyPatch,
    *,
    guests: int = 1,
    segment: Segment | None = None,
    nat: bool = False,
    site: bool = False,
    disk_mib: int | None = None,
    disk_mount: str = "",
    mounts: str | None = None,
    env: str | None = None,
) -> BootRig:
    """A boot whose plan is reserved."""
    image = publish(layout)
    more: dict[str, Any] = {"disk_mib": disk_mib, "disk_mount": disk_mount, "mounts": mounts, "env": env}
    job = lease(image, guests=guests, segment=segment, nat=nat, site=site, **more)
    monkeypatch.setattr(Cgroup, "create", lambda *_: None)
    journal = Journal(layout.journals, job.generation)
    journal.stop_when(layout.tombstone(job.generation))
    layout.job(42).mkdir(parents=True)
    plan = reserve.reserve(layout, job, NODE, SHARES, journal)
    hypervisor = RecordingHypervisor()
    recorder = Recorder(layout.timeline(job.generation), job.generation, "n1")
    work = Boot(layout, job, image, plan, NODE, journal, recorder, USER, cast(Hypervisor, hypervisor))
    rig = BootRig(work, hypervisor)
    monkeypatch.setattr(start, "Helpers", rig.start_helpers)
    return rig


class Agent:
    """A channel to an agent that does what it is told, or fails at one request."""

    def __init__(self, failing: str = "", error: ChannelError | None = None, *, locks: bool = True) -> None:
        self.asked: list[str] = []
        self.info = GuestInfo("0.9.0", "boot", "4.18.0-553.el8", "n1", 4, 1 << 20, 0, 1.0, locks)
        self._failing, self._error = failing, error

    def __enter__(self) -> Agent:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        def request(*_: object, **__: object) -> GuestInfo | None:
            self.asked.append(name)
            if name == self._failing and self._error is not None:
                raise self._error
            return self.info if name == "ready" else None

        return request


def connect(monkeypatch: pytest.MonkeyPatch, peer: Agent) -> None:
    """Have each guest answer as this agent does."""
    monkeypatch.setattr(agent, "_connect", lambda _path: None)
    monkeypatch.setattr(guest_channel.GuestChannel, "connect", lambda *_: peer)


def finished(work: Generator[None, None, T]) -> T:
    """What a generator returns."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            return cast(T, end.value)


def run(rig: BootRig) -> RunningNode:
    return finished(sequence.boot(rig.work))
