# SPDX-License-Identifier: Apache-2.0
"""Each kind of resource on this machine: how one is taken, and what an observer sees of it.

Leftovers are looked up in /proc, /sys, the file system, ``ip`` and ``nft``, or in the fake of libvirt,
of a Fabric Manager or of a PCI bus: never with the class under test.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from device_rig import Rig, machine, passthrough, state
from fake_fmpm import Fmpm
from fake_mdev import TYPE, FakeMdev, FakeVgpus
from network_lab import Cluster, inside, ip, lease_of, plan_of, usable
from node_rig import publish, spawn

from vhpc_slurm.config import Devices
from vhpc_slurm.config.network import Network
from vhpc_slurm.device import PassthroughDevice, mdev_key
from vhpc_slurm.model import Generation, SiteInterface
from vhpc_slurm.node.devices import nvswitch
from vhpc_slurm.node.guest import libvirtd
from vhpc_slurm.node.host import cgroup, process
from vhpc_slurm.node.host.limits import Limits
from vhpc_slurm.node.network import nat
from vhpc_slurm.node.resource.cgroup import ControlGroup
from vhpc_slurm.node.resource.device import AssignedDevice
from vhpc_slurm.node.resource.disk import Disk
from vhpc_slurm.node.resource.domain import Domain
from vhpc_slurm.node.resource.image import Image
from vhpc_slurm.node.resource.job_network import JobNetwork
from vhpc_slurm.node.resource.memory import Memory
from vhpc_slurm.node.resource.nat import Nat
from vhpc_slurm.node.resource.nvswitch import NvSwitch
from vhpc_slurm.node.resource.process import Process
from vhpc_slurm.node.resource.reservations import Reservations
from vhpc_slurm.node.resource.run_folder import RunFolder
from vhpc_slurm.node.resource.site import Site
from vhpc_slurm.node.resource.uid import Uid
from vhpc_slurm.node.store.journal import Journal
from vhpc_slurm.node.store.layout import Layout

GENERATION = Generation(os.getpid(), 0, "0123abcd")
LEASE = replace(lease_of(1, 5000, "n1", "n2"), generation=GENERATION)
NAME = str(GENERATION)
GUEST = f"vhpc-{GENERATION.job_id}-0-0123abcd-g0"


@dataclass
class Case:
    """A kind of resource.

    Attributes:
        layout: of the node.
        take: takes one.
        left: what there is of it; empty before and after.
    """

    layout: Layout
    take: Callable[[Journal], object]
    left: Callable[[], list[object]]


@dataclass
class Host:
    """The host that cases are made from."""

    layout: Layout
    folder: Path
    patch: pytest.MonkeyPatch
    fixture: Callable[[str], Any]
    opened: ExitStack = field(default_factory=ExitStack)


def content(folder: Path) -> list[object]:
    """Names in a folder and below."""
    return [*sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))]


def marked() -> list[object]:
    """Processes that have the generation in their environment; not those that wait for their parent."""
    found: list[object] = []
    mark = f"{process.MARKER}={NAME}".encode()
    for path in Path("/proc").iterdir():
        if path.name.isdecimal() and int(path.name) != os.getpid():
            try:
                if mark in (path / "environ").read_bytes().split(b"\0"):
                    found.append(path.name)
            except OSError:
                continue
    return found


def run_folder(host: Host) -> Case:
    return Case(
        host.layout,
        lambda journal: RunFolder().take(host.layout, journal),
        lambda: content(host.folder / "run/jobs"),
    )


def reservations(host: Host) -> Case:
    """A reservation is nothing but its entry."""
    guest = SimpleNamespace(index=0, pins=(), cells=(), hugepage_kib=4, devices=())
    plan = cast(Any, SimpleNamespace(generation=GENERATION, guests=(guest,)))
    return Case(
        host.layout,
        lambda journal: Reservations().take(journal, plan),
        lambda: content(host.folder / "state/journal"),
    )


def image(host: Host) -> Case:
    found = publish(host.layout)
    return Case(
        host.layout,
        lambda journal: Image().take(host.layout, journal, found),
        lambda: content(host.folder / "store/pins"),
    )


def uid(host: Host) -> Case:
    return Case(
        host.layout,
        lambda journal: Uid().take(host.layout, journal),
        lambda: content(host.folder / "run/uids"),
    )


def disk(host: Host) -> Case:
    return Case(
        host.layout,
        lambda journal: Disk().take(host.layout, journal, 0, 16, "n1"),
        lambda: content(host.folder / "disks"),
    )


def helper_process(host: Host) -> Case:
    def take(journal: Journal) -> None:
        key = Process().announce(journal, "g0:shim", "shim")
        Process().note(journal, key, spawn("sleep", "600", generation=NAME))

    return Case(host.layout, take, marked)


def control_group(host: Host) -> Case:
    limits = Limits(memory_mib=512, helper_memory_mib=64, tasks=64, helper_tasks=32, cpus=(0,))
    try:
        for one in cgroup.hierarchies():
            probe = one.mount / f"vhpc-probe-{os.getpid()}"
            probe.mkdir()
            probe.rmdir()
    except OSError:
        pytest.skip("control groups cannot be made here: run as root, with /sys/fs/cgroup writable")
    return Case(
        host.layout,
        lambda journal: ControlGroup().take(journal, limits),
        lambda: [folder for folder, *_ in os.walk("/sys/fs/cgroup") if NAME in folder],
    )


def memory(host: Host) -> Case:
    """A process of the user holds a memfd, which belongs to the job from when the journal has named it."""
    script = "import os, time; os.write(os.memfd_create('guest'), b'x'); print(flush=True); time.sleep(600)"
    config = host.layout.config
    layout = Layout(
        msgspec.structs.replace(config, guests=msgspec.structs.replace(config.guests, cgroups="off"))
    )
    holders: list[subprocess.Popen[bytes]] = []
    named: list[int] = []

    def hold() -> None:
        holders.append(subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE))
        host.opened.callback(holders[-1].kill)
        said = holders[-1].stdout
        assert said is not None
        said.readline()

    def take(journal: Journal) -> None:
        Memory().take(journal, os.getuid()).add_guest([holders[-1].pid])

    def left() -> list[object]:
        if any('"inodes":[[' in path.read_text() for path in layout.journals.glob("*")):
            named.append(holders[-1].pid)
        if holders[-1].poll() is not None:
            hold()
        return [holders[-1].pid] if holders[-1].pid in named else []

    hold()
    return Case(layout, take, left)


def domain(host: Host) -> Case:
    domains = host.folder / "domains"
    domains.mkdir()

    class Hypervisor:
        def destroy(self, name: str) -> None:
            (domains / name).unlink(missing_ok=True)

    @contextmanager
    def connect(*_: object) -> Iterator[Hypervisor]:
        yield Hypervisor()

    host.patch.setattr(libvirtd, "connect", connect)
    return Case(
        host.layout,
        lambda journal: Domain().take(journal, GUEST, 4_100_000, (domains / GUEST).touch),
        lambda: content(domains),
    )


def device(host: Host) -> Case:
    rig = host.opened.enter_context(machine(host.folder, gpus=1))
    rig.give_to_host(gpu := rig.gpus[0])
    before = state(gpu)
    return Case(
        rig.layout,
        lambda journal: AssignedDevice().take(rig.layout, journal, passthrough(gpu), rig.host),
        lambda: [] if state(gpu) == before else [state(gpu)],
    )


def gpu_rig(host: Host, *lines: str) -> Rig:
    """A node with a GPU that the host has, and a GPU map; ``{}`` in it is the GPU."""
    rig = host.opened.enter_context(machine(host.folder, gpus=1))
    rig.give_to_host(rig.gpus[0])
    text = "".join(f"{index} {line}\n" for index, line in enumerate(lines))
    (host.folder / "gpu.map").write_text(text.format(rig.gpus[0].address))
    return rig


def mediated_device(host: Host) -> Case:
    rig = gpu_rig(host, f"{{}} mdev={TYPE}")
    gpu = rig.gpus[0].address
    kernel = FakeMdev(rig, rig.gpus[0])
    found = PassthroughDevice(mdev_key(gpu, 0), "mdev", 0, "pci0000:08", parent=gpu)
    return Case(
        rig.layout,
        lambda journal: AssignedDevice().take(rig.layout, journal, [found], rig.host),
        lambda: [*kernel.made],
    )


def vgpu(host: Host) -> Case:
    rig = gpu_rig(host)
    kernel = FakeVgpus(rig, rig.gpus[0])
    vf = kernel.vfs[0]
    (host.folder / "gpu.map").write_text(f"0 {vf.address} vgpu=H200X-1-18C\n")
    return Case(
        rig.layout,
        lambda journal: AssignedDevice().take(rig.layout, journal, passthrough(vf, role="vgpu"), rig.host),
        lambda: [kind for kind in kernel.now.values() if kind != "0"],
    )


def nvswitch_partition(host: Host) -> Case:
    fmpm: Fmpm = host.fixture("fmpm")
    config = msgspec.structs.replace(host.layout.config, devices=Devices(fmpm=(str(fmpm.script),)))
    gpu = PassthroughDevice("0000:0b:00.0", "gpu", 0, "pci0000:00")
    plan = cast(Any, SimpleNamespace(node="n1", guests=(SimpleNamespace(devices=(gpu,)),)))
    return Case(
        Layout(config),
        lambda journal: NvSwitch().take(nvswitch.Fmpm(config.devices), journal, plan, {gpu.key: 3}),
        lambda: list(fmpm.active),
    )


def in_namespace(host: Host) -> None:
    if why := usable():
        pytest.skip(why)
    cluster: Cluster = host.fixture("cluster")
    host.opened.enter_context(inside(cluster.nodes["n1"].namespace))


def network_left() -> list[object]:
    """Interfaces, tables and processes of vhpc for guests; not the node's own table."""
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, check=True, text=True).stdout
    tables = subprocess.run(["nft", "list", "tables"], capture_output=True, check=True, text=True).stdout
    names = (line.split(":")[1].strip() for line in links.splitlines())
    return [
        *(name for name in names if name.startswith("vhpc")),
        *(line for line in tables.splitlines() if NAME in line),
        *marked(),
    ]


def job_network(host: Host) -> Case:
    in_namespace(host)
    host.layout.run.mkdir()
    plan = plan_of(LEASE, "n1")
    return Case(
        host.layout, lambda journal: JobNetwork().take(host.layout, journal, LEASE, plan), network_left
    )


def nat_filter(host: Host) -> Case:
    in_namespace(host)
    config = msgspec.structs.replace(host.layout.config.controller, host="192.0.2.9")
    layout = Layout(msgspec.structs.replace(host.layout.config, controller=config))
    guest = cast(Any, SimpleNamespace(index=0, nat=nat.interface(layout.config.network)))
    return Case(layout, lambda journal: Nat().take(layout, journal, LEASE, guest, 4_100_000), network_left)


def site_tap(host: Host) -> Case:
    in_namespace(host)
    ip("link", "add", "name", "br-site", "type", "bridge")
    ip("link", "set", "dev", "br-site", "up")
    host.opened.callback(ip, "link", "delete", "dev", "br-site")
    site = Network(
        allowed=("none", "job", "nat", "site"),
        site_bridge="br-site",
        site_ipv4="198.51.100.0/24",
        site_gateway="198.51.100.200",
    )
    known = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("198.51.100.20", 0))]
    host.patch.setattr(socket, "getaddrinfo", lambda *_, **__: known)
    layout = Layout(msgspec.structs.replace(host.layout.config, network=site))
    layout.state.mkdir(parents=True)

    found = SiteInterface("br-site", 2, "198.51.100.200")
    return Case(layout, lambda journal: Site().take(layout, journal, "n1", 0, found), network_left)


CASES: dict[str, Callable[[Host], Case]] = {
    "rundir": run_folder,
    "claim": reservations,
    "image": image,
    "uid": uid,
    "disk": disk,
    "process": helper_process,
    "cgroup": control_group,
    "memory": memory,
    "domain": domain,
    "device": device,
    "device/mdev": mediated_device,
    "device/vgpu": vgpu,
    "nvswitch": nvswitch_partition,
    "network": job_network,
    "nat": nat_filter,
    "site": site_tap,
}
"""By the name in journals; of devices also by their class, where the steps differ."""
