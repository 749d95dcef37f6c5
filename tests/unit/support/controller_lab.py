# SPDX-License-Identifier: Apache-2.0
"""Helpers for tests of munge and vhpcd: real munged processes, a catalogue, requests, other users."""

from __future__ import annotations

import encodings.idna  # noqa: F401 - getaddrinfo's, which another user may not be able to import later
import errno
import hashlib
import json
import os
import pickle
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Literal

from pace import limit
from vhpc_slurm import record
from vhpc_slurm.config import Config, Guests
from vhpc_slurm.config.fabric import Fabric
from vhpc_slurm.config.network import Network
from vhpc_slurm.config.policy import Rule
from vhpc_slurm.controller.leases import layer
from vhpc_slurm.controller.store.port import LeaseStore
from vhpc_slurm.controller.sync.audit import FabricAudit
from vhpc_slurm.controller.sync.batch import FabricBatches
from vhpc_slurm.controller.sync.isolation import IsolationWatch
from vhpc_slurm.errors import FabricError, UserError
from vhpc_slurm.fabric.backend import NetworkBackend
from vhpc_slurm.model import (
    Allocation,
    Blob,
    Generation,
    GresAllocation,
    ImageIdentity,
    ImageManifest,
    ImageRef,
    JobRequest,
    LeaseRecord,
    LeaseState,
    NodeAllocation,
    Timeline,
)

HAVE_MUNGED = shutil.which("munged", path=f"{os.environ.get('PATH', '')}:/usr/sbin") is not None
NOBODY = 65534
record.prepare()  # tests have clients in several threads

# munged asks the clock with time(2) only; this moves it for one munged.
_SHIFT = """
#include <time.h>
#include <stdlib.h>
time_t time(time_t *out)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    now.tv_sec += atol(getenv("CLOCK_SHIFT"));
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}
"""


class Munged:
    """A munged of our own; its folder is open to all users, as libmunge wants it."""

    def __init__(self, folder: Path, key: bytes, shift_s: int = 0) -> None:
        self.folder, self.key, self.socket = folder, key, folder / "socket"
        key_file = folder / "key"
        key_file.write_bytes(key)
        key_file.chmod(0o600)
        environment = {"PATH": "/usr/sbin:/usr/bin:/bin"}
        if shift_s:
            (folder / "shift.c").write_text(_SHIFT)
            subprocess.run(
                ["cc", "-shared", "-fPIC", "-o", folder / "shift.so", folder / "shift.c"], check=True
            )
            environment |= {"LD_PRELOAD": str(folder / "shift.so"), "CLOCK_SHIFT": str(shift_s)}
        self.process = subprocess.Popen(
            [
                shutil.which("munged", path="/usr/sbin:/usr/bin") or "munged",
                "--foreground",
                "--force",
                f"--key-file={key_file}",
                f"--socket={self.socket}",
                f"--pid-file={folder}/pid",
                f"--log-file={folder}/log",
                f"--seed-file={folder}/seed",
            ],
            env=environment,
            stderr=(folder / "stderr").open("w"),
        )
        wait_for(self.socket.exists, f"munged did not start: {(folder / 'stderr').read_text()}")

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(60)


@contextmanager
def munged(key: bytes | None = None, shift_s: int = 0) -> Iterator[Munged]:
    folder = Path(tempfile.mkdtemp(prefix="munged-"))
    folder.chmod(0o755)
    daemon = Munged(folder, key or os.urandom(128), shift_s)
    try:
        yield daemon
    finally:
        daemon.stop()
        shutil.rmtree(folder)


def wait_for(ready: Callable[[], object], complaint: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + limit(seconds)
    while not ready():
        assert time.monotonic() < deadline, complaint
        time.sleep(0.02)


def as_uid(uid: int, call: Callable[[], Any]) -> Any:
    """Run ``call`` in a child that has become that user; its result, or its exception, comes back."""
    back, there = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            try:
                result: tuple[bool, Any] = (True, call())
            except Exception as err:
                result = (False, (type(err).__name__, str(err), traceback.format_exc()))
            os.write(there, pickle.dumps(result))
        finally:
            os._exit(0)
    os.close(there)
    with os.fdopen(back, "rb") as pipe:
        worked, value = pickle.loads(pipe.read())
    os.waitpid(child, 0)
    if not worked:
        raise ChildError(*value)
    return value


class ChildError(Exception):
    """The error in the other user's process: type name, text, traceback."""


def free_port() -> int:
    """A port without a listener, which the kernel gives to no outgoing connection (32768 and up)."""
    choice = random.SystemRandom()
    while True:
        port = choice.randrange(15000, 30000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port


def bind_from(link: socket.socket, source: str, port: int) -> None:
    """Bind to a privileged port, or to one of three others below it; to any port if it is 0.

    Clients of tests in other workers have privileged ports of this machine too.
    """
    for own in range(port, port - 400, -100) if port else [0]:
        try:
            link.bind((source, own))
            return
        except OSError as err:
            if err.errno != errno.EADDRINUSE or port - own == 300:
                raise


def manifest(name: str = "debian-minimal", tag: str = "latest", min_memory_mib: int = 256) -> ImageManifest:
    blob = Blob("kernel", "0" * 64, 1)
    return ImageManifest(
        schema=1,
        name=name,
        tag=tag,
        arch="x86_64",
        kernel=blob,
        initrd=Blob("initrd", "1" * 64, 1),
        root=Blob("root", "2" * 64, 1),
        root_format="erofs",
        init="agent",
        cmdline="quiet",
        min_memory_mib=min_memory_mib,
        firmware="bios",
        drivers=(),
        agent_version="1",
    )


def publish(catalog: Path, image: ImageManifest) -> str:
    """Put a manifest into a catalogue under its name; returns the digest, in which the name is a label."""
    base = json.loads((Path(__file__).parents[2] / "data/manifests/manifest.json").read_text())
    versions = dict(image.driver_versions)
    fields = base | {
        "agent_version": image.agent_version,
        "arch": image.arch,
        "cmdline": image.cmdline,
        "description": image.description,
        "drivers": {name: versions.get(name, "") for name in image.drivers},
        "firmware": image.firmware,
        "init": image.init,
        "labels": {"test": f"{image.name}:{image.tag}"},
        "min_cpus": image.min_cpus,
        "min_memory_mib": image.min_memory_mib,
        "provenance": base["provenance"] | {"created": image.created},
    }
    for part, blob in (("kernel", image.kernel), ("initrd", image.initrd), ("root", image.root)):
        fields[part] = base[part] | {"sha256": blob.sha256, "size": blob.size}
    raw = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    digest = hashlib.sha256(raw).hexdigest()
    for folder in (catalog / "manifests/sha256", catalog / "names" / image.name):
        folder.mkdir(parents=True, exist_ok=True)
    (catalog / "manifests/sha256" / f"{digest}.json").write_bytes(raw)
    (catalog / "names" / image.name / image.tag).write_text(f"sha256:{digest}\n")
    return f"sha256:{digest}"


def identity(min_memory_mib: int = 256) -> ImageIdentity:
    return ImageIdentity(
        ImageRef("debian-minimal"), "sha256:" + "a" * 64, manifest(min_memory_mib=min_memory_mib)
    )


def request(job_id: int = 42, restart: int = 0, **other: Any) -> JobRequest:
    fields: dict[str, Any] = {
        "uid": 2001,
        "gid": 2001,
        "user": "alice",
        "work_dir": "/home/alice",
        "image": ImageRef("debian-minimal"),
        "job_name": "job",
        "partition": "all",
    }
    return JobRequest(job_id=job_id, restart=restart, **(fields | other))


def allocation(*nodes: str, memory_mib: int = 2048, cpu_ids: tuple[int, ...] = (0, 1)) -> Allocation:
    gres = (GresAllocation("gpu", "h200", 2, (0, 1)), GresAllocation("ibvf", "", 2))
    return Allocation(
        tuple(NodeAllocation(node, cpu_ids, memory_mib, gres) for node in nodes or ("n1", "n2"))
    )


def stop(process: subprocess.Popen[str], number: int = signal.SIGTERM) -> int:
    process.send_signal(number)
    return process.wait(60)


class Alone:
    """vhpcd without threads: each call has its batch of the fabric at once."""

    def __init__(
        self,
        store: LeaseStore,
        network: NetworkBackend,
        *,
        reserve_mib: int,
        quarantine_s: float = 0.0,
        lost_after_s: float = 900.0,
        refuse_exhausted: bool = False,
        key_owner: Literal["job", "user"] = "job",
        job_network: Network = Network(),  # noqa: B008 - frozen
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
        policy: tuple[Rule, ...] = (),
    ) -> None:
        config = Config(
            policy=policy,
            guests=Guests(memory_reserve_mib=reserve_mib),
            fabric=Fabric(
                key_owner=key_owner,
                quarantine_s=int(quarantine_s),
                lost_after_s=int(lost_after_s),
                exhausted="refuse" if refuse_exhausted else "requeue",
            ),
            network=job_network,
        )
        self.store = store
        self.leases = layer.build(store, network, config, clock=clock, steady=steady)
        self.batches = FabricBatches(self.leases.batches, network)
        self.audit = FabricAudit(
            self.batches, self.leases.batches, network, IsolationWatch(60.0, 300.0, time.monotonic)
        )
        self.reserve = self.leases.opening.reserve
        self.take = self.leases.nodes.take
        self.report = self.leases.nodes.report
        self.alarms = self.leases.nodes.alarms
        self.look = self.leases.queries.look
        self.prune = self.leases.queries.prune

    def open(self, job: JobRequest, nodes: Allocation, image: ImageIdentity | UserError) -> LeaseRecord:
        underlay = {
            part.node: str(ip_address("192.0.2.10") + place) for place, part in enumerate(nodes.nodes)
        }
        record = self.reserve(job, nodes, image, underlay)
        if record.lease.state is LeaseState.RESERVED:
            result = self.batches.run([record.lease.generation])[record.lease.generation]
            if isinstance(result, FabricError):
                raise result
            return result
        self._strip()
        return record

    def end(self, job_id: int, restart: int | None) -> None:
        self.leases.lifecycle.end_job(job_id, restart)
        self._strip()

    def acknowledge(
        self, generation: Generation, node: str, *, clean: bool, note: str, timeline: Timeline | None
    ) -> None:
        self.leases.nodes.acknowledge(generation, node, clean=clean, note=note, timeline=timeline)
        self._strip()

    def settle(self) -> None:
        self.leases.settling.run()
        self._strip()

    def _strip(self) -> None:
        if self.leases.lifecycle.has_leaving:
            with suppress(FabricError):
                self.batches.run()
