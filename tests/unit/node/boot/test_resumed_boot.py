# SPDX-License-Identifier: Apache-2.0
"""The boot of a job that continues a checkpoint: what is refused, copied, restored, and told to the agent."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from boot_rig import (
    GENERATION,
    NODE,
    SHARES,
    Agent,
    BootRig,
    StillHelpers,
    boot_layout,
    connect,
    prepared,
    run,
)
from domain_cases import DEVICES
from libvirt_ends import PADDED, Restored, header, snapshot, state
from stepd import needs_root

from vhpc_slurm.config.shares import Shares
from vhpc_slurm.errors import NodeError, UserError
from vhpc_slurm.model import Generation, Resume, SavedGuest, SavedNode
from vhpc_slurm.node.boot import start
from vhpc_slurm.node.checkpoint import facts, folder, save
from vhpc_slurm.node.checkpoint.seal import SealKey
from vhpc_slurm.node.guest import hold, libvirtd, shares
from vhpc_slurm.node.guest.libvirtd import DomainRefusedError, Hypervisor
from vhpc_slurm.node.host.process import ProcessRef
from vhpc_slurm.node.store.layout import Layout

pytestmark = needs_root
ORIGIN = Generation(41, 0, "89abcdef")
KEY = bytes(range(32))
MIB = 1 << 20
DISK = b"content of the disk".ljust(8192, b".")


@pytest.fixture(name="layout")
def layout_with_checkpoints(layout_: Layout) -> Layout:
    root = layout_.run.parent / "checkpoints"
    root.mkdir(mode=0o700)
    section = msgspec.structs.replace(layout_.config.checkpoint, folder=str(root))
    return Layout(msgspec.structs.replace(layout_.config, checkpoint=section))


layout_ = pytest.fixture(name="layout_")(getattr(boot_layout, "__wrapped__", boot_layout))


class RestoringHypervisor:
    """libvirt as the boot of a resumed job sees it."""

    def __init__(self) -> None:
        self.restored: list[tuple[Restored, str]] = []
        self.error: NodeError | None = None

    def version(self) -> tuple[int, int]:
        return 11_003_000, 10_000_000

    def create(self, *_: object) -> None:
        raise AssertionError("a resumed guest is not created")

    def restore(self, path: str, xml: str, timeout_s: float, watch: Callable[[], None]) -> None:
        assert timeout_s > 1
        watch()
        if self.error is not None:
            raise self.error
        reader = Restored()
        reader.load(path)
        self.restored.append((reader, xml))

    def running(self, _name: str) -> bool:
        return True


def saved(layout: Layout, rig: BootRig, disk: bool) -> SavedNode:
    """A checkpoint of guests like those of the rig."""
    found = []
    source = layout.run / "disk"
    with source.open("wb") as file:
        file.write(DISK)
        file.truncate(64 * MIB)
    with folder.made(Path(layout.config.checkpoint.folder), 7) as place:
        for guest in rig.work.plan.guests:
            key = SealKey(KEY, 7, f"{guest.index}.state")
            data = state(300_000 + guest.index)

            def write(path: str, data: bytes = data) -> None:
                snapshot(path, data, header())

            seal = save.save_state(place, key, layout.run / "fifo", write)
            key = SealKey(KEY, 7, f"{guest.index}.disk")
            own = save.save_disk(place, key, source) if disk else None
            one = SavedGuest(guest.index, guest.hostname, len(guest.pins), guest.memory_mib, seal, own)
            found.append(one)
    return SavedNode("n9", 10_000_000, facts.EMULATED, 1.0, tuple(found))


def resumed(
    layout: Layout, monkeypatch: pytest.MonkeyPatch, *, disk: bool = False, guests: int = 1
) -> BootRig:
    rig = prepared(layout, monkeypatch, guests=guests, disk_mib=64 if disk else None)
    resume = Resume(7, "ck", ORIGIN, (saved(layout, rig, disk),), KEY)
    hypervisor = cast(Hypervisor, RestoringHypervisor())
    rig.change(lease=replace(rig.work.lease, resume=resume), hypervisor=hypervisor)

    def helpers(*_: object) -> StillHelpers:
        made = StillHelpers(shim=ProcessRef(100 + len(rig.helpers), 5))
        rig.helpers.append(made)
        return made

    monkeypatch.setattr(start, "Helpers", helpers)
    return rig


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Times that agents were told."""
    times: list[int] = []
    monkeypatch.setattr(hold, "resume", lambda _channel, now: times.append(now))
    return times


def restored(rig: BootRig) -> list[tuple[Restored, str]]:
    found: list[tuple[Restored, str]] = cast(Any, rig.work.hypervisor).restored
    return found


def test_a_resumed_guest_is_restored_and_told_the_time_alone(
    layout: Layout, monkeypatch: pytest.MonkeyPatch, told: list[int]
) -> None:
    rig = resumed(layout, monkeypatch, disk=True, guests=2)
    peer = Agent()
    connect(monkeypatch, peer)
    run(rig)
    assert peer.asked == ["hello", "hello"]
    assert [abs(one - time.time_ns()) < 30e9 for one in told] == [True, True]
    for index, (reader, xml) in enumerate(restored(rig)):
        data = state(300_000 + index)
        assert reader.all[92 + PADDED :] == data[92 + PADDED :]
        name = f"<name>vhpc-42-0-0123abcd-g{index}</name>"
        assert name in xml
        assert name.encode() in reader.head
        uuid = xml.partition("<uuid>")[2].partition("</uuid>")[0]
        assert f"<uuid>{uuid}</uuid>".encode() in reader.head
    for guest in rig.work.plan.guests:
        content = Path(guest.paths.disk).read_bytes()
        assert content[: len(DISK)] == DISK
        assert not any(content[len(DISK) :])
        assert list(Path(guest.paths.run_dir).glob("*.fifo*")) == []


def test_a_resumed_guest_can_be_saved_again(
    layout: Layout, monkeypatch: pytest.MonkeyPatch, told: list[int]
) -> None:
    rig = resumed(layout, monkeypatch, disk=True, guests=2)
    connect(monkeypatch, Agent())
    run(rig)
    assert len(told) == 2
    kept = facts.read(layout, GENERATION)
    assert (kept.node, kept.cpu) == ("n1", "emulated")
    assert [(one.rank, one.hostname, one.domain) for one in kept.guests] == [
        (0, "n1-g0", "vhpc-42-0-0123abcd-g0"),
        (1, "n1-g1", "vhpc-42-0-0123abcd-g1"),
    ]
    for one, guest in zip(kept.guests, rig.work.plan.guests, strict=True):
        assert (one.vcpus, one.memory_mib, one.disk) == (len(guest.pins), guest.memory_mib, guest.paths.disk)
        assert one.shim == ProcessRef(100 + one.index, 5)
    assert layout.saveable(42).stat().st_mode & 0o777 == 0o600


def test_without_a_folder_of_checkpoints_nothing_is_kept(
    layout_: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = prepared(layout_, monkeypatch)
    connect(monkeypatch, Agent())
    run(rig)
    assert not layout_.saveable(42).exists()


def test_guests_with_devices_cannot_be_saved(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    guests = prepared(layout, monkeypatch).work.plan.guests
    assert facts.is_saveable(layout.config, guests)
    assert not facts.is_saveable(layout.config, (replace(guests[0], devices=DEVICES.devices), *guests[1:]))


def changed_node(**changes: Any) -> Callable[[SavedNode], SavedNode]:
    return lambda node: replace(node, **changes)


def changed_guest(**changes: Any) -> Callable[[SavedNode], SavedNode]:
    return lambda node: replace(node, guests=(replace(node.guests[0], **changes),))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (changed_node(qemu=10_001_002), "QEMU is older: 10.1.2 on n9, which saved it, 10.0.0 on n1"),
        (
            changed_node(cpu="AMD EPYC"),
            "the CPU is another one: AMD EPYC on n9, which saved it, emulated on n1",
        ),
        (changed_node(guests=()), "the number of guests is another one: 0 on n9"),
        (
            changed_guest(vcpus=3),
            "the number of CPUs of guest n1 is another one: 3 on n9, which saved it, 4 on",
        ),
        (changed_guest(memory_mib=7), "the memory of guest n1 is another one: 7 MiB on n9"),
        (changed_guest(disk=None), "the disk of guest n1: none on n9, which saved it, one on n1"),
    ],
    ids=["qemu", "cpu", "guests", "vcpus", "memory", "disk"],
)
def test_another_node_or_shape_is_refused_before_the_start(
    layout: Layout, monkeypatch: pytest.MonkeyPatch, change: Callable[[SavedNode], SavedNode], why: str
) -> None:
    rig = resumed(layout, monkeypatch, disk=True)
    resume = rig.work.lease.resume
    assert resume is not None
    resume = replace(resume, nodes=(change(resume.nodes[0]),))
    rig.change(lease=replace(rig.work.lease, resume=resume))
    kinds = [entry.kind for entry in rig.work.journal.held()]
    with pytest.raises(UserError, match="cannot be resumed on n1") as caught:
        run(rig)
    assert why in caught.value.line()
    assert [entry.kind for entry in rig.work.journal.held()] == kinds


def test_a_node_without_the_folder_refuses(
    layout: Layout, layout_: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = resumed(layout, monkeypatch)
    rig.change(layout=layout_)
    with pytest.raises(UserError, match=r"checkpoint\.folder is not set there"):
        run(rig)


@pytest.mark.parametrize("file", ["0.state", "0.disk"])
def test_a_damaged_checkpoint_fails_the_job_and_no_node(
    layout: Layout, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    rig = resumed(layout, monkeypatch, disk=True)
    with (Path(layout.config.checkpoint.folder) / "7" / file).open("r+b") as damaged:
        damaged.write(b"!")
    with pytest.raises(UserError, match=f"its file 7/{file} is damaged"):
        run(rig)


def test_a_state_that_libvirt_refuses_fails_the_job_and_no_node(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = resumed(layout, monkeypatch)
    cast(Any, rig.work.hypervisor).error = DomainRefusedError("cannot restore the guest", "QEMU said no")
    with pytest.raises(UserError, match="the checkpoint ck cannot be resumed on n1: QEMU said no"):
        run(rig)
    rig.change(lease=rig.work.lease)
    assert [one.closed for one in rig.helpers] == [True]


def test_a_libvirt_that_hangs_is_the_nodes_fault(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = resumed(layout, monkeypatch)
    cast(Any, rig.work.hypervisor).error = libvirtd.SilentError("cannot restore the guest", "no answer")
    with pytest.raises(NodeError, match="no answer"):
        run(rig)


def test_the_cpu_of_a_node_with_kvm_is_the_hosts() -> None:
    assert facts.cpu_of(NODE) == "emulated"
    assert facts.cpu_of(replace(NODE, kvm=True)).startswith("GenuineIntel")


def test_daemons_of_guests_that_can_be_saved_can_be_restored() -> None:
    plain = shares.command(Shares(), SHARES[0], 7)
    assert shares.command(Shares(), SHARES[0], 7, migrates=True) == [*plain, *shares.MIGRATION]
