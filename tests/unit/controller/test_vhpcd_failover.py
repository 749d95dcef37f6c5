# SPDX-License-Identifier: Apache-2.0
"""Several vhpcd processes at one database: killed, frozen and thawed, cut off; and their clients."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from controller_lab import Munged, allocation, request, stop, wait_for
from vhpcd_pair import NEEDS, Pair, running_pair

from vhpc_slurm.cli.host.checks import CheckResult, Level, services
from vhpc_slurm.config import Config
from vhpc_slurm.config.controller import Controller as Settings
from vhpc_slurm.config.database import Database
from vhpc_slurm.controller import exchange
from vhpc_slurm.controller.client import ControllerClient
from vhpc_slurm.controller.epochs import Epochs
from vhpc_slurm.controller.store.writership import TAKEOVER_S
from vhpc_slurm.errors import FabricError
from vhpc_slurm.model import Lease

pytestmark = [pytest.mark.long, *NEEDS]


@pytest.fixture
def pair(tmp_path: Path, daemon: Munged, run_dir: str) -> Iterator[Pair]:
    with running_pair(tmp_path, daemon, run_dir) as found:
        yield found


def test_one_is_active_and_the_other_says_that_it_is_a_standby(pair: Pair) -> None:
    pair.open()
    wait_for(
        lambda: "on first is the active vhpcd" in pair.second.log,
        "the standby does not know the active vhpcd",
    )
    with pytest.raises(
        FabricError, match=r"vhpcd on second is a standby: process \d+ on first is the active"
    ):
        ControllerClient(pair.config, host="127.0.0.3").status()
    assert pair.jobs() == [1]


def test_doctor_names_the_active_vhpcd_and_broken_standbys(pair: Pair) -> None:
    def found() -> CheckResult:
        (one,) = [one for one in services.vhpcd(pair.config, listener=True) if one.check == "vhpcd.standby"]
        return one

    assert found().level is Level.OK
    assert "127.0.0.2 is active, standbys: 127.0.0.3" in found().what
    pair.second.kill()
    assert found().level is Level.ERROR
    assert "127.0.0.3 cannot take over" in found().what


def test_several_vhpcd_need_a_database_server() -> None:
    with pytest.raises(ValueError, match=r"backup_hosts needs database\.engine"):
        Config(controller=Settings(backup_hosts=("ctl2",)))


@pytest.mark.promise("ha.takeover")
def test_after_kill_9_the_standby_takes_over(pair: Pair) -> None:
    pair.open()
    pair.first.kill()
    pair.open()
    assert pair.second.times_active() == 1
    assert pair.jobs() == [1, 2]


def test_a_restarted_vhpcd_continues_at_once(pair: Pair) -> None:
    pair.open()
    pair.first.kill()
    pair.first.start()
    wait_for(lambda: pair.first.times_active() == 2, "it waits")
    assert pair.second.times_active() == 0
    assert pair.jobs() == [1]


def test_a_vhpcd_that_cannot_serve_leaves_it_to_another(pair: Pair) -> None:
    pair.first.kill()
    file = pair.first.vhpcd.folder / "vhpc.toml"
    text = file.read_text().replace('backend = "none"', 'backend = "opensm-file"')
    file.write_text(text.replace('port_map = ""', 'port_map = "/nowhere"'))
    pair.first.start()
    assert pair.first.process is not None
    assert pair.first.process.wait(60) == 1
    assert "/nowhere" in pair.first.log
    wait_for(lambda: pair.second.times_active() == 1, "the standby waits")
    pair.open()


def test_a_vhpcd_that_is_stopped_hands_over_at_once(pair: Pair) -> None:
    pair.open()
    assert pair.first.process is not None
    assert stop(pair.first.process) == 0
    wait_for(lambda: pair.second.times_active() == 1, "it waits")
    pair.open()
    assert pair.jobs() == [1, 2]


@pytest.mark.promise("ha.thawed")
def test_a_thawed_vhpcd_changes_nothing_and_is_a_standby(pair: Pair) -> None:
    pair.open()
    pair.first.signal(signal.SIGSTOP)
    pair.open()
    pair.first.signal(signal.SIGCONT)
    wait_for(lambda: pair.first.log.count("listens as a standby") == 2, "it goes on")
    assert "this vhpcd is no longer the active one" in pair.first.log
    pair.open()
    assert pair.first.times_active() == pair.second.times_active() == 1
    assert pair.jobs() == [1, 2, 3]
    assert pair.first.process is not None
    assert pair.first.process.poll() is None, "the process goes on"


@pytest.mark.promise("ha.thawed")
def test_an_answer_of_a_thawed_vhpcd_never_counts(pair: Pair) -> None:
    """Requests that wait in its connections are answered by the thaw, if at all."""
    pair.open()
    outcomes: list[str] = []

    def ask() -> None:
        try:
            ControllerClient(pair.config, host="127.0.0.2").open_generation(request(99), allocation())
            outcomes.append("answered")
        except FabricError as err:
            outcomes.append(err.line())

    pair.first.signal(signal.SIGSTOP)
    asking = [threading.Thread(target=ask) for _ in range(8)]
    for one in asking:
        one.start()
    wait_for(lambda: pair.second.times_active() == 1, "no takeover")
    pair.first.signal(signal.SIGCONT)
    for one in asking:
        one.join(60)
    assert "answered" not in outcomes
    assert len(outcomes) == len(asking)
    assert pair.jobs() == [1]


@pytest.mark.promise("ha.takeover")
def test_one_cut_from_the_database_ends_before_another_begins(pair: Pair) -> None:
    pair.open()
    pair.first.cut(off=True)
    wait_for(lambda: "no longer the active one" in pair.first.log, "it goes on")
    assert pair.second.times_active() == 0
    pair.open()
    pair.first.cut(off=False)
    pair.open()
    assert pair.first.times_active() == 1
    assert pair.jobs() == [1, 2, 3]


@pytest.mark.promise("ha.takeover")
def test_a_database_that_returns_late_is_used_at_once(pair: Pair) -> None:
    pair.open()
    pair.first.cut(off=True)
    pair.second.cut(off=True)
    time.sleep(TAKEOVER_S + 4.0)
    pair.first.cut(off=False)
    pair.second.cut(off=False)
    wait_for(lambda: pair.first.times_active() + pair.second.times_active() == 2, "it waits")
    pair.open()
    assert pair.jobs() == [1, 2]


@pytest.mark.promise("ha.one-active")
def test_starts_during_takeovers_get_one_lease_each(pair: Pair) -> None:
    leases: dict[int, Lease] = {}

    def start(first: int) -> None:
        for job in range(first, first + 6):
            leases[job] = pair.client.open_generation(request(job), allocation())

    starting = [threading.Thread(target=start, args=(100 * number,)) for number in range(1, 5)]
    for one in starting:
        one.start()
    for victim in (pair.first, pair.second):
        victim.signal(signal.SIGSTOP)
        other = pair.second if victim is pair.first else pair.first
        before = other.times_active()
        wait_for(lambda: other.times_active() > before, "no takeover")  # noqa: B023 - called at once
        victim.signal(signal.SIGCONT)
        wait_for(lambda: victim.log.count("as a standby") >= 2, "it goes on")  # noqa: B023
    for one in starting:
        one.join(120)
    assert len(leases) == 24
    assert pair.jobs() == sorted(leases)


@pytest.mark.promise("ha.thawed")
def test_a_node_refuses_epochs_lower_than_it_has_seen(pair: Pair) -> None:
    pair.open()
    kept = Path(pair.config.paths.state) / "vhpcd-epoch"
    epoch = int(kept.read_text())
    assert f"epoch {epoch}" in pair.first.log
    kept.write_text(f"{epoch + 1}\n")
    quick = msgspec.structs.replace(
        pair.config, controller=msgspec.structs.replace(pair.config.controller, request_timeout_s=1)
    )
    with pytest.raises(FabricError, match=f"answered with epoch {epoch}, and"):
        ControllerClient(quick, patient=False).status()


def test_epochs_are_kept_for_the_next_process(tmp_path: Path) -> None:
    one = Epochs(tmp_path)
    assert one.accept(5)
    assert one.accept(5)
    other = Epochs(tmp_path)
    assert not other.accept(4)
    assert other.accept(7)
    assert not one.accept(6)
    (tmp_path / "vhpcd-epoch").write_text("damaged")
    with suppress(OSError):
        assert Epochs(tmp_path).accept(3)


def test_without_the_folder_an_epoch_counts_for_the_process(tmp_path: Path) -> None:
    one = Epochs(tmp_path / "missing")
    assert one.accept(5)
    assert not one.accept(4)


def test_a_host_with_a_vhpcd_asks_itself_first(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []

    def ask(hosts: tuple[str, ...], *_: object, keep: bool) -> None:
        del keep
        asked.append(hosts)
        raise FabricError("enough")

    monkeypatch.setattr(exchange, "Round", ask)
    config = Config(
        controller=Settings(host="ctl1", backup_hosts=("ctl2", "ctl3")), database=Database(engine="mariadb")
    )
    for name in ("ctl2.example.org", "n1", "ctl1"):
        monkeypatch.setattr(socket, "gethostname", lambda name=name: name)
        with pytest.raises(FabricError):
            ControllerClient(config).status()
    assert asked == [("ctl2", "ctl1", "ctl3"), ("ctl1", "ctl2", "ctl3"), ("ctl1", "ctl2", "ctl3")]
