# SPDX-License-Identifier: Apache-2.0
"""The guests of a node are held, saved, released and ended together, and a failure leaves none held."""

from __future__ import annotations

import errno
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_libvirt import PAUSED, RUNNING, FakeLibvirt, installed
from libvirt_ends import NEW_XML
from stepd import needs_root

from vhpc_slurm.config import Config
from vhpc_slurm.errors import NodeError, TeardownError
from vhpc_slurm.model import Generation, GuestUsage, KeeperOrder, OrderKind, Resume
from vhpc_slurm.node.checkpoint import facts, restore
from vhpc_slurm.node.checkpoint.facts import GuestFacts, NodeFacts
from vhpc_slurm.node.checkpoint.guests import Guests
from vhpc_slurm.node.guest import hold, libvirtd, usage
from vhpc_slurm.node.guest.channel import ChannelRefusedError, ChannelSilentError, GuestChannel
from vhpc_slurm.node.guest.usage import AskedGuest
from vhpc_slurm.node.host import process, signalling
from vhpc_slurm.node.host.process import ProcessRef
from vhpc_slurm.node.store import usage as stored_usage
from vhpc_slurm.node.store.layout import Layout, domain_name

pytestmark = needs_root
GENERATION = Generation(42, 0, "0123abcd")
ORDER = KeeperOrder(OrderKind.SAVE, 7, "a", bytes(32))
NAMES = [domain_name(GENERATION, index) for index in (0, 1)]


class Site:
    """Two guests of a job on a node, their agents and shims."""

    def __init__(self, folder: Path, libvirt: FakeLibvirt) -> None:
        self.root = folder / "checkpoints"
        self.root.mkdir(mode=0o700)
        raw = {
            "paths": {name: str(folder / name) for name in ("state", "run", "log")},
            "checkpoint": {"folder": str(self.root)},
        }
        self.layout = Layout(msgspec.convert(raw, Config))
        self.libvirt = libvirt
        self.agents: list[str] = []
        self.signals: list[tuple[int, str]] = []
        self.failing: dict[str, Exception] = {}
        found = []
        for index, name in enumerate(NAMES):
            libvirt.add(name)
            self.layout.guest(42, index).mkdir(parents=True)
            disk = folder / f"disk{index}"
            disk.write_bytes(b"disk" * 1000)
            shim = ProcessRef(100 + index, 1)
            found.append(GuestFacts(index, 2 + index, f"n2-g{index}", name, 4, 512, str(disk), shim))
        self.facts = NodeFacts(GENERATION, "n2", "emulated", tuple(found))
        facts.write(self.layout, self.facts)

    def agent(self, call: str, folder: str) -> None:
        self.agents.append(f"{call} {folder}")
        if error := self.failing.get(f"{call} {folder}"):
            raise error

    def send(self, ref: ProcessRef, signum: signal.Signals) -> bool:
        self.signals.append((ref.pid, signum.name))
        return f"shim {ref.pid}" not in self.failing

    def measure(self, asked: Sequence[AskedGuest]) -> tuple[GuestUsage, ...]:
        assert all(libvirt.now == RUNNING for libvirt in self.libvirt.domains.values())
        self.agents.extend(f"usage {one.folder.name}" for one in asked)
        return tuple(GuestUsage(index, missing="measured") for index in range(len(asked)))

    @property
    def states(self) -> list[int]:
        return [self.libvirt.domains[name].now for name in NAMES]


class Channel:
    """A channel that knows its guest's folder."""

    def __init__(self, path: Path) -> None:
        self.folder = path.parent.name

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    made = Site(tmp_path, installed(monkeypatch))
    monkeypatch.setattr(GuestChannel, "connect", lambda path, _timeout: Channel(path))

    def do_prepare(channel: Any, serial: int, wait_s: float) -> None:
        assert (serial, wait_s) == (7, 5.0)
        made.agent("prepare", channel.folder)

    def do_hold(channel: Any, wait_s: float) -> None:
        assert wait_s == 6.0
        made.agent("hold", channel.folder)

    monkeypatch.setattr(hold, "prepare", do_prepare)
    monkeypatch.setattr(hold, "hold", do_hold)
    monkeypatch.setattr(hold, "release", lambda channel: made.agent("release", channel.folder))
    monkeypatch.setattr(signalling, "send", made.send)
    monkeypatch.setattr(usage, "of_guests", made.measure)
    yield made
    assert [path for path in tmp_path.rglob("*") if path.is_fifo()] == []


def test_guests_are_held_saved_and_go_on(site: Site) -> None:
    found = Guests(site.layout, GENERATION)
    assert not found.held
    found.prepare(7, 5.0)
    assert sorted(site.agents) == ["prepare g0", "prepare g1"]
    found.hold(6.0)
    assert sorted(site.agents[2:4]) == ["hold g0", "hold g1"]
    assert site.agents[4:] == ["usage g0", "usage g1"]
    assert (site.signals, site.states, found.held) == ([], [RUNNING, RUNNING], False)
    saved = found.save(ORDER)
    kept = stored_usage.read(site.layout.usage(GENERATION))
    assert [one.missing for one in kept] == ["measured", "measured"]
    assert site.signals == [(100, "SIGUSR1"), (101, "SIGUSR1")]
    assert site.states == [PAUSED, PAUSED]
    assert found.held
    assert (saved.node, saved.qemu, saved.cpu, saved.seconds > 0) == ("n2", 10_000_003, "emulated", True)
    assert [(one.rank, one.hostname, one.vcpus, one.memory_mib) for one in saved.guests] == [
        (2, "n2-g0", 4, 512),
        (3, "n2-g1", 4, 512),
    ]
    assert all(one.disk is not None for one in saved.guests)
    names = [
        f"{rank}.{what}{tags}" for rank in (2, 3) for what in ("disk", "state") for tags in ("", ".tags")
    ]
    assert sorted(path.name for path in (site.root / "7").iterdir()) == names
    found.go_on()
    assert site.states == [RUNNING, RUNNING]
    assert site.signals[2:] == [(100, "SIGUSR2"), (101, "SIGUSR2")]
    assert sorted(site.agents[6:]) == ["release g0", "release g1"]
    assert (site.root / "7").is_dir()
    resume = Resume(7, "a", GENERATION, (saved,), ORDER.key)
    with libvirtd.connect("", 5.0) as hypervisor:
        for one in saved.guests:
            restore.restore_state(
                site.root,
                resume,
                one,
                site.layout.run / "fifo",
                NEW_XML,
                lambda path: hypervisor.restore(path, NEW_XML, 5.0),
            )
    assert len(site.libvirt.restored) == 2


def test_a_snapshot_has_the_memory_and_no_disk(site: Site) -> None:
    found = Guests(site.layout, GENERATION)
    found.prepare(7, 5.0)
    found.hold(6.0)
    found.save(ORDER)
    assert site.libvirt.domains[NAMES[1]].snapshots == [
        f'<domainsnapshot><memory snapshot="external" file="{site.layout.guest(42, 1)}/state.fifo" />'
        '<disks><disk name="vda" snapshot="no" /><disk name="vdb" snapshot="no" /></disks></domainsnapshot>'
    ]


BUSY = ChannelRefusedError("guest operation hold failed", errno.EBUSY, "step 5 runs")


@pytest.mark.parametrize(
    ("failing", "error", "why"),
    [
        ("prepare g1", BUSY, "guest n2-g1 cannot be stopped: step 5 runs"),
        ("prepare g0", ChannelSilentError("it is silent", "no answer"), "guest n2-g0 cannot be stopped"),
        ("hold g1", BUSY, "guest n2-g1 cannot be stopped: step 5 runs"),
        ("shim 101", OSError(), "guest n2-g1 cannot be stopped: its vhpc-shim has ended"),
        ("suspend", OSError(), "cannot suspend the guest: suspend fails"),
        ("gone", OSError(), "it has ended"),
    ],
)
def test_if_a_guest_cannot_be_held_none_is(site: Site, failing: str, error: Exception, why: str) -> None:
    site.failing[failing] = error
    if failing == "suspend":
        site.libvirt.domains[NAMES[1]].failing = failing
    if failing == "gone":
        del site.libvirt.domains[NAMES[1]]
    found = Guests(site.layout, GENERATION)

    def prepare_and_save() -> None:
        found.prepare(7, 5.0)
        found.hold(6.0)
        found.save(ORDER)

    with pytest.raises(NodeError, match=why):
        prepare_and_save()
    if not failing.startswith("prepare"):
        with suppress(NodeError):
            found.go_on()  # as the keeper does
    assert {one.now for one in site.libvirt.domains.values()} == {RUNNING}
    assert site.signals[-2:] == [(100, "SIGUSR2"), (101, "SIGUSR2")]
    assert {"release g0", "release g1"} <= set(site.agents)


def test_a_failed_save_leaves_no_file_and_the_guests_held(site: Site) -> None:
    found = Guests(site.layout, GENERATION)
    found.prepare(7, 5.0)
    site.libvirt.domains[NAMES[1]].failing = "save"
    with pytest.raises(NodeError, match="cannot save the guest: save fails"):
        found.save(ORDER)
    assert list(site.root.iterdir()) == []
    assert site.states == [PAUSED, PAUSED]


def test_a_save_without_its_folder_is_refused(site: Site) -> None:
    site.root.rmdir()
    with pytest.raises(NodeError, match="cannot be used for checkpoints"):
        Guests(site.layout, GENERATION).save(ORDER)


def test_files_of_a_failed_checkpoint_are_removed_if_told(site: Site) -> None:
    found = Guests(site.layout, GENERATION)
    found.prepare(7, 5.0)
    found.hold(6.0)
    found.save(ORDER)
    (site.root / "7/0.state").touch()
    found.go_on(failed=7)
    assert [path.name for path in (site.root / "7").iterdir()] == ["0.state"]


def test_a_new_keeper_lets_guests_go_on_that_are_held_in_part(site: Site) -> None:
    site.libvirt.domains[NAMES[1]].now = PAUSED
    refused = ChannelRefusedError("guest operation release failed", errno.EINVAL, "no hold")
    site.failing["release g0"] = refused
    found = Guests(site.layout, GENERATION)
    assert found.held
    found.go_on()
    assert site.libvirt.calls == [f"resume {NAMES[1]}"]
    assert not found.held


def test_one_guest_that_does_not_go_on_keeps_no_other(site: Site) -> None:
    found = Guests(site.layout, GENERATION)
    found.prepare(7, 5.0)
    found.hold(6.0)
    found.save(ORDER)
    site.libvirt.domains[NAMES[0]].failing = "resume"
    with pytest.raises(NodeError, match="cannot resume the guest: resume fails"):
        found.go_on()
    assert site.states == [PAUSED, RUNNING]
    assert "release g1" in site.agents


def test_a_killed_guest_is_logged_once_until_it_continues(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    found = Guests(site.layout, GENERATION)
    site.libvirt.domains[NAMES[0]].now = PAUSED
    site.libvirt.domains[NAMES[0]].failing = "resume"
    silent = "cannot connect to root.sock"
    site.failing["release g0"] = NodeError(silent)
    for outage in (1, 2):
        for _ in range(3):
            with pytest.raises(NodeError, match="cannot resume"):
                found.go_on()
        assert caplog.text.count(silent) == outage
        site.libvirt.domains[NAMES[0]].failing = ""
        with pytest.raises(NodeError, match=silent):
            found.go_on()
        site.libvirt.domains[NAMES[0]].now = PAUSED
        site.libvirt.domains[NAMES[0]].failing = "resume"


def test_ended_guests_are_gone_and_their_shims_are_told_nothing(site: Site) -> None:
    found = Guests(site.layout, GENERATION)
    found.prepare(7, 5.0)
    found.hold(6.0)
    found.save(ORDER)
    found.end()
    found.end()
    assert site.libvirt.domains == {}
    assert len(site.signals) == 2


def test_a_guest_that_cannot_be_ended_is_reported(site: Site) -> None:
    site.libvirt.domains[NAMES[0]].failing = "destroy"
    with pytest.raises(TeardownError, match="cannot be ended"):
        Guests(site.layout, GENERATION).end()


def test_guests_of_another_generation_are_not_found(site: Site) -> None:
    with pytest.raises(NodeError, match="is of another one"):
        Guests(site.layout, Generation(42, 1, "0123abcd"))
    site.layout.saveable(42).write_text("{")
    with pytest.raises(NodeError, match="cannot be saved"):
        Guests(site.layout, GENERATION)
    site.layout.saveable(42).unlink()
    with pytest.raises(NodeError, match="No such file"):
        Guests(site.layout, GENERATION)


def test_a_signal_reaches_exactly_its_process() -> None:
    child = subprocess.Popen(["/usr/bin/sleep", "60"])
    started = process.start_time(child.pid)
    assert started is not None
    assert not signalling.send(ProcessRef(child.pid, started + 1), signal.SIGTERM)
    assert signalling.send(ProcessRef(child.pid, started), signal.SIGTERM)
    assert child.wait(10) == -signal.SIGTERM
    assert not signalling.send(ProcessRef(child.pid, started), signal.SIGTERM)
