# SPDX-License-Identifier: Apache-2.0
"""The order in which the daemons of shared folders start, and enter the control group of their generation."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from domain_cases import FLAT
from node_rig import account

from vhpc_slurm.config import Config
from vhpc_slurm.model import Generation, GuestPaths, Share
from vhpc_slurm.node.boot.helpers import Helpers
from vhpc_slurm.node.host import confine, process
from vhpc_slurm.node.host.cgroup import Cgroup, CgroupEntry
from vhpc_slurm.node.host.confine import Confinement, ShareAbsentError
from vhpc_slurm.node.host.limits import Limits
from vhpc_slurm.node.store.journal import Journal
from vhpc_slurm.node.store.layout import Layout

GENERATION = Generation(42, 0, "0123abcd")
SHARES = tuple(Share(f"site{n}", f"/sw{n}", read_only=True, why="site") for n in range(3))


class Group(Cgroup):
    """A control group whose helpers' scope systemd makes when the first helper runs."""

    def __init__(self, *, systemd: bool) -> None:
        super().__init__(str(GENERATION), [], systemd=systemd)
        self.made = not systemd

    def entry(self, limits: Limits) -> CgroupEntry:
        """As that of a node."""
        return CgroupEntry() if self.made else CgroupEntry(prefix=("systemd-run",))


class Daemon:
    """A started helper; the folder of one named absent cannot be entered."""

    def __init__(self, group: Group, path: str, events: list[str], absent: str) -> None:
        self.ref = process.ProcessRef(os.getpid(), 1)
        self._group, self._path, self._events, self._absent = group, path, events, absent

    def finish(self, timeout_s: float) -> process.ProcessRef:
        """Wait until it runs its program."""
        del timeout_s
        self._group.made = self._path != self._absent  # an empty scope is removed
        self._events.append(f"runs {self._path}")
        if self._path == self._absent:
            raise ShareAbsentError("Permission denied")
        return self.ref


@pytest.mark.parametrize(
    ("systemd", "absent", "order"),
    [
        (False, "", "start /sw0, start /sw1, start /sw2, other, runs /sw0, runs /sw1, runs /sw2"),
        (True, "", "scope /sw0, runs /sw0, start /sw1, start /sw2, other, runs /sw1, runs /sw2"),
        (True, "/sw0", "scope /sw0, runs /sw0, scope /sw1, runs /sw1, start /sw2, other, runs /sw2"),
    ],
)
def test_one_daemon_makes_the_scope_that_others_enter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, systemd: bool, absent: str, order: str
) -> None:
    events: list[str] = []
    group = Group(systemd=systemd)

    def start(command: object, own: Confinement, **_: object) -> Daemon:
        del command
        assert own.share is not None
        assert own.entry is not None
        events.append(f"{'scope' if own.entry.prefix else 'start'} {own.share.path}")
        return Daemon(group, own.share.path, events, absent)

    monkeypatch.setattr(confine, "start", start)
    paths = {name: str(tmp_path / name) for name in ("state", "run", "log")}
    layout = Layout(msgspec.convert({"paths": paths}, Config))
    guest = replace(FLAT, paths=GuestPaths(str(tmp_path)))
    limits = Limits(memory_mib=512, helper_memory_mib=64, tasks=64, helper_tasks=32, cpus=(0,))
    journal = Journal(layout.journals, GENERATION)
    helpers = Helpers(layout, journal, guest, account(), os.getuid(), group, limits)
    helpers.start_daemons(SHARES)
    events.append("other")
    served = helpers.served()
    helpers.close()
    assert ", ".join(events) == order
    assert [share.path for share in served] == [one.path for one in SHARES if one.path != absent]
    assert len(journal.held()) == len(served)
    journal.close()
