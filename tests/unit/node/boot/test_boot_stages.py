# SPDX-License-Identifier: Apache-2.0
"""The boot of a node's guests: what it announces, what it asks libvirt for, and who is at fault."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from boot_rig import NODE, SHARES, Agent, BootRig, StillHelpers, boot_layout, connect, prepared, run
from domain_cases import DEVICES
from stepd import needs_root

from vhpc_slurm.cli.host import plan as cli_plan
from vhpc_slurm.config import Devices
from vhpc_slurm.device import NodeDevices
from vhpc_slurm.errors import NodeError, UserError, VhpcError
from vhpc_slurm.model import RunningGuest
from vhpc_slurm.node import plan as node_plan
from vhpc_slurm.node.boot import agent, diagnose, reserve, sequence, start
from vhpc_slurm.node.boot.helpers import Helpers
from vhpc_slurm.node.boot.state import Started
from vhpc_slurm.node.guest import channel as guest_channel
from vhpc_slurm.node.guest import qemulog, refusal
from vhpc_slurm.node.guest.channel import ChannelError, ChannelRefusedError, ChannelSilentError
from vhpc_slurm.node.guest.libvirtd import DomainRefusedError
from vhpc_slurm.node.host.confine import DisturbedError
from vhpc_slurm.node.store import joblock
from vhpc_slurm.node.store.journal import Stopped
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.placement.usage import NOTHING

layout = boot_layout
pytestmark = needs_root


@pytest.fixture
def rig(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> Iterator[BootRig]:
    found = prepared(layout, monkeypatch)
    yield found
    found.work.journal.close()


# --- the plan and the domain ------------------------------------------------------------


def test_vhpc_plan_prints_the_domain_that_prolog_starts(
    rig: BootRig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    connect(monkeypatch, Agent())
    run(rig)
    monkeypatch.setattr(cli_plan, "_hypervisor", lambda _config, _arch: (rig.hypervisor.version()[0], ""))
    case = node_plan.of_lease(rig.work.lease, NODE, SHARES, NOTHING, NodeDevices())
    assert cli_plan.show(rig.work.layout.config, case, xml=True, as_json=False) == 0
    assert [capsys.readouterr().out] == rig.hypervisor.domains
    assert "/g0/channel/agent.sock" in rig.hypervisor.domains[0]
    assert "/g0/fs-workdir0.sock" in rig.hypervisor.domains[0]
    assert "/g0/locks.sock" in rig.hypervisor.domains[0]


@pytest.mark.parametrize("absent", [False, True])
def test_the_lock_daemon_serves_the_folders_that_are_there(
    rig: BootRig, monkeypatch: pytest.MonkeyPatch, absent: bool
) -> None:
    helpers = StillHelpers(absent=absent)
    monkeypatch.setattr(start, "Helpers", lambda *_: helpers)
    connect(monkeypatch, Agent())
    run(rig)
    assert helpers.with_locks == (() if absent else SHARES)
    assert ("/g0/locks.sock" in rig.hypervisor.domains[0]) is not absent
    assert "<partition>" in rig.hypervisor.domains[0]


@pytest.mark.promise("shares.locks")
@pytest.mark.parametrize(
    ("locks", "absent", "notes"), [(True, False, 0), (False, False, 1), (False, True, 0)]
)
def test_the_report_says_that_locks_stay_in_the_guest(
    rig: BootRig, monkeypatch: pytest.MonkeyPatch, locks: bool, absent: bool, notes: int
) -> None:
    """A guest without shared folders needs none."""
    monkeypatch.setattr(start, "Helpers", lambda *_: StillHelpers(absent=absent))
    connect(monkeypatch, Agent(locks=locks))
    found = run(rig).notes
    assert len(found) == notes
    for line in found:
        assert line.startswith("locks on files of shared folders hold within each guest only: ")
        assert "kernel 4.18.0-553.el8" in line


def test_a_plan_carries_deadlines_paths_and_shares(rig: BootRig) -> None:
    plan, (guest,) = rig.work.plan, rig.work.plan.guests
    run_dir = rig.work.layout.run / "jobs/42/g0"
    assert plan.shares == SHARES
    # defaults of guests.stage_timeout_s and guests.boot_timeout_s; ordinary pages without devices
    assert (guest.start_timeout_s, guest.boot_timeout_s) == (60, 120)
    assert (guest.paths.run_dir, guest.paths.console_log) == (str(run_dir), str(run_dir / "console.log"))
    root = rig.work.image.manifest.root.sha256
    assert guest.paths.root == f"{rig.work.layout.config.images.store}/blobs/sha256/{root}"


def test_guests_start_by_the_plan_whose_devices_were_bound(
    rig: BootRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan is made again if devices turn out to be unfit."""
    bound, (guest,) = rig.work.plan, rig.work.plan.guests
    rig.change(plan=replace(bound, guests=(replace(guest, devices=DEVICES.devices[:1]),)))
    monkeypatch.setattr(reserve, "take_devices", lambda _work: bound)
    connect(monkeypatch, Agent())
    node = run(rig)
    assert (node.plan, [one.plan for one in node.guests]) == (bound, [guest])
    assert "<hostdev" not in rig.hypervisor.domains[0]


@pytest.mark.promise("devices.nvswitch-driver")
def test_a_wrong_driver_is_refused_before_the_image_is_copied(rig: BootRig) -> None:
    """The node's Fabric Manager has another version."""
    devices = Devices(fmpm=("/nowhere",), fabric_manager=("/bin/echo", "580.95.05"))
    work, (guest,) = rig.work, rig.work.plan.guests
    manifest = replace(work.image.manifest, driver_versions=(("nvidia", "570.86.15"),))
    rig.change(
        layout=Layout(msgspec.structs.replace(work.layout.config, devices=devices)),
        plan=replace(work.plan, guests=(replace(guest, devices=DEVICES.devices[:1]),)),
        image=replace(work.image, manifest=manifest),
    )
    with pytest.raises(UserError, match=r"has NVIDIA's driver 570\.86\.15: the Fabric Manager of n1 has"):
        run(rig)
    assert work.recorder.timeline().stages == ()


# --- what is announced ------------------------------------------------------------------


def test_memory_is_taken_before_all_guests_and_released_after(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = prepared(layout, monkeypatch, guests=2)
    connect(monkeypatch, Agent())
    run(rig)
    # what is held, newest first, is the order of the releases
    kinds = [entry.kind for entry in rig.work.journal.held()]
    assert kinds == ["domain", "uid", "domain", "uid", "memory", "cgroup", "image", "claim", "claim"]
    uids = sorted(entry.data["uid"] for entry in rig.work.journal.held() if entry.kind == "uid")
    assert sorted(rig.work.journal.entry("memory").data["owners"]) == [2001, *uids]
    assert [helpers.closed for helpers in rig.helpers] == [True, True]


def test_a_boot_whose_job_has_ended_takes_nothing_more(rig: BootRig) -> None:
    joblock.write_tombstone(rig.work.layout, rig.work.lease.generation)
    with pytest.raises(Stopped):
        run(rig)
    assert [entry.kind for entry in rig.work.journal.held()] == ["claim"]
    assert rig.hypervisor.domains == []


def test_an_exception_in_a_wait_ends_the_boot_there(rig: BootRig, monkeypatch: pytest.MonkeyPatch) -> None:
    connect(monkeypatch, Agent("hello", ChannelSilentError("the guest's agent does not answer", "")))
    booting = sequence.boot(rig.work)
    next(booting)
    with pytest.raises(Stopped):
        booting.throw(Stopped("generation 42.0.0123abcd was ended"))
    assert [helpers.closed for helpers in rig.helpers] == [True]
    stage = rig.work.recorder.timeline().stages[-1]
    assert (stage.name, stage.detail) == ("agent g0", "failed: generation 42.0.0123abcd was ended")


# --- libvirt refuses --------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [NodeError("libvirt is gone"), UserError("the user stopped a daemon of a shared folder")]
)
def test_an_error_of_the_start_is_passed_on(rig: BootRig, error: NodeError | UserError) -> None:
    rig.hypervisor.error = error
    with pytest.raises(type(error)) as caught:
        run(rig)
    assert caught.value is error


def test_a_daemon_stopped_by_its_user_explains_a_failed_start(
    rig: BootRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = StillHelpers(disturbance=DisturbedError("the daemon of shared folder home0 was stopped"))
    monkeypatch.setattr(start, "Helpers", lambda *_: stopped)
    rig.hypervisor.error = NodeError("libvirt does not answer")
    with pytest.raises(UserError, match="home0 was stopped on n1 while image tiny:1 booted"):
        run(rig)


def test_a_daemon_killed_before_the_hello_names_node_and_image(
    rig: BootRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = StillHelpers(disturbance=DisturbedError("the daemon of shared folder home0 was ended"))
    monkeypatch.setattr(start, "Helpers", lambda *_: killed)
    error = fail_at_hello(rig, monkeypatch, alive=False, crash=None)
    assert error.what == "the daemon of shared folder home0 was ended on n1 while image tiny:1 booted"


def test_a_refused_domain_is_judged(rig: BootRig, monkeypatch: pytest.MonkeyPatch) -> None:
    judged = refusal.RefusedGuestError("n1", "QEMU: no such machine")
    monkeypatch.setattr(refusal, "judge", lambda *_, **__: judged)
    rig.hypervisor.error = DomainRefusedError("libvirt refuses the guest", "no such machine")
    with pytest.raises(refusal.RefusedGuestError, match="QEMU: no such machine"):
        run(rig)


def test_a_refused_own_image_is_no_alarm(rig: BootRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its user can have it refused at will."""
    asked: list[bool] = []

    def judge(*_: object, own_image: bool) -> UserError:
        asked.append(own_image)
        return UserError("the guest does not start")

    image, stage_image = rig.work.image, start.stage_image
    monkeypatch.setattr(refusal, "judge", judge)
    monkeypatch.setattr(start, "stage_image", lambda work: stage_image(replace(work, image=image)))
    rig.change(image=replace(image, ref=replace(image.ref, own=True)))
    rig.hypervisor.error = DomainRefusedError("libvirt refuses the guest", "no such machine")
    with pytest.raises(UserError):
        run(rig)
    assert asked == [True]


# --- a guest that does not come up ------------------------------------------------------


def fail_at_hello(
    rig: BootRig, monkeypatch: pytest.MonkeyPatch, *, said: str = "", alive: bool, crash: str | None
) -> VhpcError:
    rig.hypervisor.alive = alive
    monkeypatch.setattr(diagnose, "END_S", 0.0)
    monkeypatch.setattr(qemulog, "crash", lambda _name: crash)
    peer = Agent("hello", ChannelError("the guest has closed its channel", ""))

    def connected(*_: object) -> Agent:
        Path(rig.work.plan.guests[0].paths.console_log).write_text(said)
        return peer

    monkeypatch.setattr(agent, "_connect", lambda _path: None)
    monkeypatch.setattr(guest_channel.GuestChannel, "connect", connected)
    with pytest.raises(UserError) as caught:
        run(rig)
    return caught.value


@pytest.mark.promise("boot.end")
@pytest.mark.parametrize(
    ("said", "alive", "crash", "words"),
    [
        ("Kernel panic - not syncing: VFS\n", False, "", "did not boot on n1: its console ended with: Kern"),
        ("", True, None, "did not boot on n1: it wrote nothing to its console"),
        ("", False, "killed by signal 11", "QEMU crashed on n1 while image tiny:1 booted: killed by signal"),
        ("", False, "", "the guest ended on n1 while image tiny:1 booted: QEMU crashed or was killed"),
    ],
)
def test_a_guest_that_ends_in_its_boot_fails_the_job(
    rig: BootRig, monkeypatch: pytest.MonkeyPatch, said: str, alive: bool, crash: str | None, words: str
) -> None:
    assert words in fail_at_hello(rig, monkeypatch, said=said, alive=alive, crash=crash).line()


def test_one_of_several_guests_is_named(rig: BootRig, monkeypatch: pytest.MonkeyPatch) -> None:
    (guest,) = rig.work.plan.guests
    two = tuple(replace(guest, hostname=f"n1-g{index}") for index in (0, 1))
    both = []
    for guests in ((guest,), two):
        rig.change(plan=replace(rig.work.plan, guests=guests))
        started = Started(RunningGuest(guests[0], 4_100_000), cast(Helpers, StillHelpers()), 0.0)
        both.append(diagnose.boot_failure(rig.work, started, late=True).line())
    assert "s on n1: it wrote" in both[0]
    assert "s on n1 (guest n1-g0): it wrote" in both[1]


def test_a_guest_that_is_late_names_its_deadline_and_the_option(
    rig: BootRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    (guest,) = rig.work.plan.guests
    rig.change(plan=replace(rig.work.plan, guests=(replace(guest, boot_timeout_s=0),)))
    connect(monkeypatch, Agent("hello", ChannelSilentError("the guest's agent does not answer", "")))
    with pytest.raises(UserError, match=r"did not get ready within 0 s on n1.*--vhpc-timeout"):
        run(rig)


@pytest.mark.promise("boot.end")
@pytest.mark.parametrize(("alive", "kind"), [(True, NodeError), (False, UserError)])
def test_a_dead_channel_is_the_nodes_fault_if_the_guest_lives(
    rig: BootRig, monkeypatch: pytest.MonkeyPatch, alive: bool, kind: type[VhpcError]
) -> None:
    rig.hypervisor.alive = alive
    monkeypatch.setattr(diagnose, "END_S", 0.0)
    with pytest.raises(kind):  # no QEMU has made the socket
        run(rig)


@pytest.mark.promise("boot.end")
@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("alive", "hung_up", "kind"),
    [(False, False, UserError), (True, True, UserError), (True, False, NodeError)],
)
def test_a_guest_that_ends_under_its_shim_fails_the_job(
    rig: BootRig, monkeypatch: pytest.MonkeyPatch, alive: bool, hung_up: bool, kind: type[VhpcError]
) -> None:
    """The shim's socket has no listener any more; the guest has minutes left to boot."""
    rig.hypervisor.alive = alive
    helpers = StillHelpers(hung_up=hung_up)

    def start_shim(_agent: object) -> None:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(Path(rig.work.plan.guests[0].paths.run_dir) / "root.sock"))
            listener.listen()

    monkeypatch.setattr(helpers, "start_shim", start_shim)
    monkeypatch.setattr(start, "Helpers", lambda *_: helpers)
    monkeypatch.setattr(agent, "_connect", lambda _path: None)
    monkeypatch.setattr(diagnose, "END_S", 0.0)
    with pytest.raises(kind):
        run(rig)


# --- setting up -------------------------------------------------------------------------


def test_a_guest_is_ready_only_after_identity_and_mounts(
    rig: BootRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = Agent()
    connect(monkeypatch, peer)
    run(rig)
    assert peer.asked == ["hello", "identity", "mount", "ready"]


@pytest.mark.parametrize("failing", ["identity", "mount", "ready"])
def test_an_agent_that_refuses_a_request_fails_the_job(
    rig: BootRig, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    connect(monkeypatch, Agent(failing, ChannelRefusedError(f"the guest refused {failing}", 28, "no space")))
    with pytest.raises(UserError, match=r"image tiny:1 could not be set up on n1.*no space"):
        run(rig)


def test_a_guest_that_takes_no_topology_boots_without_it(
    rig: BootRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    (guest,) = rig.work.plan.guests
    rig.change(plan=replace(rig.work.plan, guests=(replace(guest, nccl_topology="<system/>"),)))
    peer = Agent("topology", ChannelRefusedError("the guest refused topology", 38, "older agent"))
    connect(monkeypatch, peer)
    run(rig)
    assert peer.asked[-2:] == ["topology", "ready"]


def test_a_guest_without_an_address_still_knows_its_name() -> None:
    assert agent.hosts("n1", ()) == ["127.0.1.1 n1"]
    both = (("n1", "10.0.0.1"), ("n2", "10.0.0.2"))
    assert agent.hosts("n1", both) == ["10.0.0.1 n1", "10.0.0.2 n2"]


def test_waits_end_at_the_deadline_of_their_own_guest(rig: BootRig) -> None:
    """The second of two guests is not given the time that the first one used up."""
    helpers: Any = StillHelpers()
    peer: Any = Agent("hello", ChannelSilentError("the guest's agent does not answer", ""))
    with pytest.raises(ChannelSilentError):
        next(iter(agent.wait_for_hello(helpers, peer, time.monotonic() + 0.5)))
