# SPDX-License-Identifier: Apache-2.0
"""Files of OpenSM that others change under a running vhpcd, whose auditor looks every five minutes only."""

from __future__ import annotations

import base64
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from controller_lab import Munged, wait_for
from fabric_lab import DEFAULT, GUIDS, SimulatedFabric, holding, sets
from opensm_disturbances import KINDS
from vhpcd_fabric import HAVE_ALL, NEEDED, a_vhpcd, carries, opened
from vhpcd_process import Vhpcd

from vhpc_slurm.fabric import filewatch
from vhpc_slurm.fabric.filewatch import FileWatch, Inotify, Watched
from vhpc_slurm.fabric.managers import serve
from vhpc_slurm.fabric.opensm import Opensm

pytestmark = pytest.mark.long
simulated = pytest.mark.skipif(not HAVE_ALL, reason=NEEDED)

OPENING = DEFAULT + f"key_1000=0x1000 : {GUIDS[0]:#018x}=full, {GUIDS[9]:#018x}=full ;\n".encode()


@pytest.fixture
def vhpcd(tmp_path: Path, daemon: Munged, fabric: SimulatedFabric) -> Iterator[Vhpcd]:
    """It has seen the fabric once, and will not look again by itself while a test lasts."""
    with a_vhpcd(tmp_path, daemon, fabric, audit_interval_s=300.0, reconcile_s=300.0) as started:
        opened(started, 1, "n1", "n2")
        wait_for(lambda: started.client.status().fabric.audited is not None, "no audit")
        quiet(started, 2.5)  # the audit after the job's batch is over
        yield started


def states_of(process: subprocess.Popen[str] | None) -> set[str]:
    """The states of all threads of a process: proc(5), behind the name in brackets."""
    assert process is not None
    stats = Path(f"/proc/{process.pid}/task").glob("*/stat")
    return {stat.read_text().rpartition(") ")[2][0] for stat in stats}


def quiet(vhpcd: Vhpcd, seconds: float) -> None:
    """Wait until vhpcd has not audited the fabric for so long: an audit follows a change by a second.

    On a busy machine the audit itself takes another one.
    """
    audited, since = vhpcd.client.status().fabric.audited, time.monotonic()

    def rests() -> bool:
        nonlocal audited, since
        if (now := vhpcd.client.status().fabric.audited) != audited:
            audited, since = now, time.monotonic()
        return time.monotonic() - since > seconds

    wait_for(rests, "the audits do not end")


def in_place(path: Path) -> None:
    path.write_bytes(OPENING)


def renamed(path: Path) -> None:
    new = path.with_name("other")
    new.write_bytes(OPENING)
    new.replace(path)


def emptied(path: Path) -> None:
    os.truncate(path, 0)


def appended(path: Path) -> None:
    with path.open("ab") as opened:
        opened.write(b"junk")


def deleted(path: Path) -> None:
    path.unlink()


def moved_away(path: Path) -> None:
    path.rename(path.with_name("away"))


@pytest.mark.promise("fabric.file", "attack.opensm-file")
@simulated
@pytest.mark.parametrize(
    "change",
    [in_place, renamed, emptied, appended, deleted, moved_away, *KINDS],
    ids=lambda one: one.__name__,
)
def test_a_changed_file_is_put_back_before_opensm_reads_it(
    vhpcd: Vhpcd, fabric: SimulatedFabric, change: Callable[[Path], None]
) -> None:
    right = fabric.partitions.read_bytes()
    before = fabric.sweeps()
    change(fabric.partitions)
    wait_for(lambda: "was changed by another program; vhpcd has restored it" in vhpcd.log, "not noticed")
    assert fabric.partitions.is_file()
    assert fabric.partitions.read_bytes() == right
    fabric.sweep()
    assert sets(fabric) == holding((0x1000, 2))
    assert fabric.sweeps() == before + 1, "there was nothing else to put right"


@pytest.mark.promise("fabric.file")
@simulated
def test_a_change_that_opensm_has_read_is_repaired_at_once(vhpcd: Vhpcd, fabric: SimulatedFabric) -> None:
    assert vhpcd.process is not None
    vhpcd.process.send_signal(signal.SIGSTOP)  # so that OpenSM is sooner
    # The other threads continue until the one that gets the signal has a CPU: one of them restores the file.
    wait_for(lambda: states_of(vhpcd.process) == {"T"}, "vhpcd does not stop")
    try:
        fabric.replace(OPENING)

        def is_read() -> bool:
            fabric.sweep()  # or the end of one that has begun before
            return 0x9000 in sets(fabric)[GUIDS[9]]

        wait_for(is_read, "OpenSM does not read the file")
    finally:
        vhpcd.process.send_signal(signal.SIGCONT)
    carries(fabric, holding((0x1000, 2)))


@simulated
def test_only_a_foreign_sweep_is_followed_by_an_audit(vhpcd: Vhpcd, fabric: SimulatedFabric) -> None:
    audited = vhpcd.client.status().fabric.audited
    fabric.sweep()
    wait_for(lambda: vhpcd.client.status().fabric.audited != audited, "no audit")
    fabric.write_table(GUIDS[9], 0x7FFF, 0x9000)
    fabric.sweep()
    carries(fabric, holding((0x1000, 2)))
    opened(vhpcd, 2)
    quiet(vhpcd, 4.0)
    audited, sweeps = vhpcd.client.status().fabric.audited, fabric.sweeps()
    time.sleep(2.0)
    assert (vhpcd.client.status().fabric.audited, fabric.sweeps()) == (audited, sweeps), "it is quiet again"


@simulated
def test_rotated_or_truncated_log_is_followed(vhpcd: Vhpcd, fabric: SimulatedFabric) -> None:
    old = fabric.log.with_suffix(".1")

    def says_so() -> None:
        audited = vhpcd.client.status().fabric.audited
        with fabric.log.open("ab") as written:
            written.write(b"Nov 22 06:08:16 448151 [50A726C0] 0x02 -> SUBNET UP\n")
        wait_for(lambda: vhpcd.client.status().fabric.audited != audited, "no audit")

    os.truncate(fabric.log, 0)
    says_so()
    fabric.log.rename(old)
    try:
        says_so()
    finally:
        old.rename(fabric.log)  # OpenSM continues to write it


@simulated
def test_endless_changes_of_the_file_are_left_to_the_auditor(
    tmp_path: Path, daemon: Munged, fabric: SimulatedFabric
) -> None:
    with a_vhpcd(tmp_path, daemon, fabric, audit_interval_s=1.0) as vhpcd:
        opened(vhpcd, 1, "n1", "n2")
        began = time.monotonic()
        while time.monotonic() < began + 5.0:
            fabric.replace(OPENING)
            time.sleep(0.01)
            assert vhpcd.client.status()
        # a machine that stops meanwhile gives vhpcd the time for more
        intervals = 1 + (time.monotonic() - began) // filewatch.BURST_S
        assert 1 <= vhpcd.log.count("vhpcd has restored it") <= filewatch.BURST * intervals
        carries(fabric, holding((0x1000, 2)))
        wait_for(lambda: vhpcd.client.status().fabric.what == "", "not well again")


# --- the watch alone ------------------------------------------------------------------------------


class Place:
    """A folder with two files, which are watched."""

    def __init__(self, folder: Path) -> None:
        self.file, self.log = folder / "conf" / "file", folder / "log" / "log"
        for path in (self.file, self.log):
            path.parent.mkdir()
            path.write_text("right")
        self.noticed = 0
        self.watch = filewatch.start([Watched(self.file, self.log, self.restore)], self.notice)

    def notice(self) -> None:
        self.noticed += 1

    def restore(self) -> bool:
        if self.file.is_file() and self.file.read_text() == "right":
            return False
        new = self.file.with_name("new")
        new.write_text("right")
        new.replace(self.file)
        return True


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setattr(filewatch, "AGAIN_S", 0.2)
    place = Place(tmp_path)
    yield place
    place.watch.close()


def test_each_change_is_noticed_except_the_own_restore(place: Place) -> None:
    place.file.write_text("wrong")
    wait_for(lambda: place.noticed == 1, "not noticed")
    assert place.file.read_text() == "right"
    time.sleep(0.3)
    assert place.noticed == 1
    (place.file.parent / "neighbour").write_text("wrong")
    (place.log.parent / "neighbour").write_text("wrong")
    time.sleep(0.3)
    assert place.noticed == 1
    with place.log.open("a") as log:
        log.write("more")
    wait_for(lambda: place.noticed == 2, "not noticed")


def test_a_folder_that_is_moved_away_and_back_is_watched_again(place: Place) -> None:
    for path in (place.file, place.log):
        before = place.noticed
        away = path.parent.with_name("away")
        path.parent.rename(away)
        time.sleep(0.5)
        away.rename(path.parent)
        time.sleep(0.5)
        before = place.noticed
        path.write_text("wrong")
        wait_for(lambda before=before: place.noticed > before, "not noticed")  # type: ignore[misc]


def test_a_folder_that_is_not_there_yet_is_watched_when_it_is(tmp_path: Path) -> None:
    filewatch.AGAIN_S, before = 0.2, filewatch.AGAIN_S
    noticed: list[int] = []
    watch = FileWatch([Watched(tmp_path / "later" / "file")], lambda: noticed.append(1))
    try:
        (tmp_path / "later").mkdir()
        time.sleep(0.5)
        (tmp_path / "later" / "file").touch()
        wait_for(lambda: noticed, "not noticed")
    finally:
        watch.close()
        filewatch.AGAIN_S = before


def test_an_end_of_the_watch_leaves_no_descriptor(tmp_path: Path) -> None:
    def descriptors() -> set[str]:
        return {file.name for file in Path("/proc/self/fd").iterdir()}

    before = descriptors()
    for _ in range(3):
        FileWatch([Watched(tmp_path / "file", tmp_path / "log")], lambda: None).close()
    # objects of other tests may be collected meanwhile, and close theirs
    assert descriptors() <= before


def test_an_event_overflow_counts_as_a_change_of_everything(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Inotify, "read", lambda _: [(-1, filewatch.IN_Q_OVERFLOW, b"")])
    place.file.write_text("wrong")
    wait_for(lambda: place.file.read_text() == "right", "not put back")


def test_the_other_end_of_a_command_puts_its_file_back_too(tmp_path: Path) -> None:
    file = tmp_path / "partitions.conf"
    file.write_bytes(DEFAULT)
    (tmp_path / "vhpc.toml").write_text(f'[fabric]\npartitions = "{file}"\n')
    with subprocess.Popen(
        [sys.executable, "-m", "vhpc_slurm.cli.main", "fabric", "manager"],
        env=os.environ | {"VHPC_CONFIG": str(tmp_path / "vhpc.toml")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as manager:
        assert manager.stdin is not None
        assert manager.stdout is not None
        manager.stdin.write(b'{"do":"read"}\n')
        manager.stdin.flush()
        manager.stdout.readline()
        file.write_bytes(DEFAULT + b"# by hand\n")  # before vhpcd has sent one, whatever is there stays
        time.sleep(0.3)
        assert file.read_bytes().endswith(b"by hand\n")
        manager.stdin.write(b'{"do":"replace","file":"' + base64.b64encode(DEFAULT) + b'"}\n')
        manager.stdin.flush()
        manager.stdout.readline()
        file.write_bytes(OPENING)
        wait_for(lambda: file.read_bytes() == DEFAULT, "not put back")
        manager.stdin.close()


def test_a_file_that_vhpcd_never_wrote_is_not_restored(tmp_path: Path) -> None:
    opensm = Opensm(tmp_path / "file", tmp_path / "pid", tmp_path / "log", 1.0)
    (tmp_path / "file").write_bytes(b"x")
    assert not opensm.put_back()
    assert (tmp_path / "file").read_bytes() == b"x"
    assert serve(opensm, b'{"do":"read"}').file == b"x"
