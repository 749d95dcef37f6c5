# SPDX-License-Identifier: Apache-2.0
"""Boots that fail because a daemon of the guest has reached a limit of its user: the user reads that."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from boot_rig import Agent, BootRig, StillHelpers, boot_layout, connect, prepared, run
from stepd import needs_root

from vhpc_slurm.errors import NodeError, UserError
from vhpc_slurm.node.boot import start
from vhpc_slurm.node.guest.channel import ChannelError
from vhpc_slurm.node.guest.libvirtd import DomainRefusedError
from vhpc_slurm.node.store.layout import Layout

pytestmark = needs_root
layout = boot_layout


@pytest.fixture
def rig(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> Iterator[BootRig]:
    found = prepared(layout, monkeypatch)
    yield found
    found.work.journal.close()


@pytest.mark.promise("user.limits")
@pytest.mark.parametrize("error", [DomainRefusedError("cannot start", "refused"), NodeError("no answer")])
def test_a_limit_of_the_user_explains_a_failed_start(
    rig: BootRig, monkeypatch: pytest.MonkeyPatch, error: NodeError
) -> None:
    why = UserError("the daemon of shared folder home0, which the guest needs, does not work")
    monkeypatch.setattr(start, "Helpers", lambda *_: StillHelpers(exhaustion=why))
    rig.hypervisor.error = error
    with pytest.raises(UserError) as caught:
        run(rig)
    assert caught.value is why


@pytest.mark.promise("user.limits")
def test_a_limit_of_the_user_explains_a_silent_guest(rig: BootRig, monkeypatch: pytest.MonkeyPatch) -> None:
    why = UserError("the daemon of shared folder home0, which the guest needs, does not work")
    monkeypatch.setattr(start, "Helpers", lambda *_: StillHelpers(exhaustion=why))
    connect(monkeypatch, Agent("hello", ChannelError("the guest has closed its channel", "")))
    with pytest.raises(UserError) as caught:
        run(rig)
    assert caught.value is why


def test_a_limit_of_the_user_explains_a_failed_setup(rig: BootRig, monkeypatch: pytest.MonkeyPatch) -> None:
    why = UserError("the daemon of shared folder home0, which the guest needs, does not work")
    monkeypatch.setattr(start, "Helpers", lambda *_: StillHelpers(exhaustion=why))
    connect(monkeypatch, Agent("mount", ChannelError("guest operation mount got no answer", "")))
    with pytest.raises(UserError) as caught:
        run(rig)
    assert caught.value is why


def test_a_start_that_a_users_limit_blocks_is_not_waited_for(
    rig: BootRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """passt continues when its epoll watches are used up, and QEMU waits for it."""
    why = UserError("passt, which the guest needs, does not work")
    monkeypatch.setattr(start, "Helpers", lambda *_: StillHelpers(exhaustion=why))
    monkeypatch.setattr(start, "SLOW_S", 0.0)

    def create(_xml: str, _timeout_s: float, watch: Callable[[], None]) -> None:
        watch()
        raise AssertionError("the wait goes on")

    monkeypatch.setattr(rig.hypervisor, "create", create)
    with pytest.raises(UserError) as caught:
        run(rig)
    assert caught.value is why
