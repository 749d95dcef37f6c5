# SPDX-License-Identifier: Apache-2.0
"""Parts of a node that need no guest: processes, locks, uids, images, state files, shares."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest
from controller_lab import request
from node_rig import GENERATION, node_layout, publish
from stepd import needs_root, stepd

from vhpc_slurm.config import Config, Shares, load
from vhpc_slurm.errors import FabricError, NodeError, UserError
from vhpc_slurm.hooks import common
from vhpc_slurm.model import Generation
from vhpc_slurm.node import resources
from vhpc_slurm.node.guest import console, shares
from vhpc_slurm.node.host import process
from vhpc_slurm.node.host.accounts import Account
from vhpc_slurm.node.store import images, joblock, journal, kinds, outbox, statefile, timeline, uids
from vhpc_slurm.node.store.journal import Journal
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.reconcile import audit

# Tests that start or count slurmstepds see each other's: one worker runs them all.
pytestmark = pytest.mark.xdist_group("slurmstepd")

layout = node_layout


def account(home: str = "/home/alice") -> Account:
    return Account("alice", 2001, 2001, "", home, "/bin/bash", (("alice", 2001),))


# --- processes ---------------------------------------------------------------


def spawn(
    *argv: str, who: process.Credentials | None = None, generation: str = GENERATION
) -> process.ProcessRef:
    """Start a program of a generation as somebody else."""
    prefix = process.drop_to(who) if who else []
    with Path("/dev/null").open("w") as null:
        return process.spawn([*prefix, *argv], generation=generation, stderr=null.fileno())


def test_a_spawned_process_has_a_session_and_a_marker() -> None:
    ref = spawn("/bin/sleep", "30")
    try:
        assert os.getsid(ref.pid) == ref.pid
        until = time.monotonic() + 5
        while (found := [r for r, _ in process.marked(GENERATION)]) != [ref] and time.monotonic() < until:
            time.sleep(0.01)
        assert found == [ref]
    finally:
        process.end(ref)
    assert not process.alive(ref)
    assert list(process.marked(GENERATION)) == []


def test_a_process_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    ref = spawn("/bin/sh", "-c", f"trap '' TERM; echo up >{tmp_path}/up; while :; do sleep 1; done")
    deadline = time.monotonic() + 5
    while not (tmp_path / "up").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.end(ref, grace_s=0.2)
    assert not process.alive(ref)


def test_a_zombie_that_nobody_reaps_is_dead() -> None:
    """Its tracer may keep a thread from being reaped for ever; that costs nothing but a number."""
    child = subprocess.Popen(["true"])
    while f"/proc/{child.pid}/stat" and Path(f"/proc/{child.pid}/stat").read_text().split()[2] != "Z":
        time.sleep(0.01)
    assert process.start_time(child.pid) is None
    process.end(process.ProcessRef(child.pid, 1))
    child.wait()


def test_a_stopped_process_is_told_from_a_running_one() -> None:
    child = subprocess.Popen(["sleep", "30"])
    ref = process.ProcessRef(child.pid, process.start_time(child.pid) or 0)
    try:
        assert not process.is_stopped(ref)
        child.send_signal(signal.SIGSTOP)
        until = time.monotonic() + 5
        while not process.is_stopped(ref) and time.monotonic() < until:
            time.sleep(0.01)
        assert process.is_stopped(ref)
        process.end(ref)
        assert not process.alive(ref)
    finally:
        child.kill()
        child.wait()


def test_a_process_that_cannot_be_read_does_not_hold_up_a_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_SCAN_S", 0.3)
    first, second = sorted(pid for pid in process._pids() if pid != os.getpid())[:2]
    monkeypatch.setattr(process, "_pids", lambda: [first, second])

    def read(pid: int) -> str:
        if pid == first:
            time.sleep(60)  # as on a file system that does not answer
        return "read"

    assert list(process.scan(read)) == [(second, "read")]


def test_a_reused_pid_is_not_ended() -> None:
    child = subprocess.Popen(["sleep", "30"])
    try:
        started = process.start_time(child.pid)
        assert started is not None
        process.end(process.ProcessRef(child.pid, started - 1))
        assert child.poll() is None
    finally:
        child.kill()
        child.wait()


def test_a_number_that_is_a_threads_now_is_not_ended() -> None:
    """As after a reboot; pidfd_open(2) says EINVAL, or ENOENT, for it."""
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        assert thread.native_id is not None
        process.end(process.ProcessRef(thread.native_id, 1))
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize(
    ("script", "number"), [("kill -9 $$", 9), ("kill -SEGV $$", 11), ("exit 3", 0), ("exit 0", 0)]
)
def test_what_a_signal_ended_is_told_from_what_ended_by_itself(script: str, number: int) -> None:
    with subprocess.Popen(["sh", "-c", f"read -r _; {script}"], stdin=subprocess.PIPE) as child:
        ref = process.ProcessRef(child.pid, process.start_time(child.pid) or 0)
        assert process.killed_by(ref) == 0
        assert child.stdin is not None
        child.stdin.close()
        assert process.wait_gone(ref, 5)
        assert [process.killed_by(ref), process.killed_by(ref)] == [number, number]
    assert process.killed_by(ref) == 0, "somebody else's child by now"


def test_ending_a_process_that_is_gone_is_done_already() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    process.end(process.ProcessRef(child.pid, 1))


def test_a_program_that_is_not_installed_is_named() -> None:
    with pytest.raises(NodeError, match="/nowhere/vhpc-confine"):
        spawn("/nowhere/vhpc-confine")


# --- locks and tombstones ----------------------------------------------------


def holder(layout: Layout, arguments: str, hold_s: float) -> subprocess.Popen[str]:
    """A process that has the lock of job 42 for so long."""
    code = f"""
import time, msgspec
from vhpc_slurm.config import Config
from vhpc_slurm.node.store import joblock
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.reconcile import audit
layout = Layout(msgspec.json.decode({msgspec.json.encode(layout.config).decode()!r}, type=Config))
with joblock.held(layout, 42, timeout_s=1{arguments}):
    print("held", flush=True)
    time.sleep({hold_s})
    print("done", flush=True)
"""
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    return child


def test_an_epilog_ends_the_prolog_that_holds_the_lock(layout: Layout) -> None:
    prolog = holder(layout, "", 60)
    assert joblock.busy(layout, 42)
    with (
        pytest.raises(NodeError, match=f"held by process {prolog.pid}"),
        joblock.held(layout, 42, timeout_s=0.1),
    ):
        pass
    with joblock.held(layout, 42, timeout_s=5, end_holder=True):
        assert process.start_time(prolog.pid) is None
    prolog.wait(5)
    assert not joblock.busy(layout, 42)


def test_an_epilog_lets_a_health_check_finish(layout: Layout) -> None:
    check = holder(layout, ", brief=True", 0.5)
    with joblock.held(layout, 42, timeout_s=10, end_holder=True):
        assert check.stdout is not None
        assert check.stdout.read() == "done\n"
    check.wait(5)


def test_an_epilog_ends_a_health_check_that_hangs(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joblock, "BRIEF_S", 0.3)
    check = holder(layout, ", brief=True", 60)
    with joblock.held(layout, 42, timeout_s=10, end_holder=True):
        assert check.stdout is not None
        assert check.stdout.read() == ""
    check.wait(5)


def test_a_tombstone_is_of_one_generation(layout: Layout) -> None:
    this, other = Generation(42, 0, "0123abcd"), Generation(42, 0, "4567cdef")
    joblock.write_tombstone(layout, this)
    assert joblock.has_tombstone(layout, this)
    assert not joblock.has_tombstone(layout, other)
    joblock.sweep(layout, older_than_s=3600)
    assert joblock.has_tombstone(layout, this)
    joblock.sweep(layout, older_than_s=-1)
    assert not joblock.has_tombstone(layout, this)


# --- uids --------------------------------------------------------------------


def test_uids_are_allocated_once_and_the_range_ends(layout: Layout) -> None:
    announced: list[int] = []
    for _ in range(3):
        uids.allocate(layout, GENERATION, announced.append)
    assert announced == [4_100_000, 4_100_001, 4_100_002]
    with pytest.raises(NodeError, match="uid_count"):
        uids.allocate(layout, GENERATION, announced.append)
    uids.release(layout, 4_100_001, GENERATION)
    assert uids.allocate(layout, "43.0.0123abcd", announced.append) == 4_100_001


def test_a_uid_is_used_again_when_all_others_have_been(layout: Layout) -> None:
    """Also after a reboot, which takes the allocations."""
    used = []
    for _ in range(5):
        used.append(uids.allocate(layout, GENERATION, lambda _: None))
        shutil.rmtree(layout.uids)
    assert [uid - 4_100_000 for uid in used] == [0, 1, 2, 0, 1]
    (layout.state / "uid-next").write_text("torn")
    assert uids.allocate(layout, GENERATION, lambda _: None) == 4_100_000


@needs_root
def test_a_uid_that_owns_a_file_is_not_handed_out(layout: Layout, tmp_path: Path) -> None:
    """A setuid file of an earlier guest's QEMU would make its starter this guest's."""
    checked = tmp_path / "world"
    (checked / "deep" / "er").mkdir(parents=True)
    (checked / "deep" / "er" / "sh").touch()
    os.chown(checked / "deep" / "er" / "sh", 4_100_000, 4_100_000)
    raw = msgspec.to_builtins(layout.config)
    raw["guests"]["uid_check_paths"] = [str(checked), str(tmp_path / "absent")]
    changed = Layout(msgspec.convert(raw, Config))
    assert uids.allocate(changed, GENERATION, lambda _: None) == 4_100_001


def test_a_uid_of_another_generation_is_not_released(layout: Layout) -> None:
    uid = uids.allocate(layout, GENERATION, lambda _: None)
    uids.release(layout, uid, "43.0.0123abcd")
    assert list(uids.allocated(layout)) == [(uid, GENERATION)]


@needs_root
def test_a_uid_in_use_is_not_given_out_and_release_ends_it(layout: Layout) -> None:
    uid = uids.allocate(layout, GENERATION, lambda _: None)
    ref = spawn("/bin/sleep", "60", who=process.Credentials(uid, 65534))
    (layout.uids / str(uid)).unlink()  # as after a loss of /run
    deadline = time.monotonic() + 5
    while not list(process.of_uid(uid)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert uids.allocate(layout, GENERATION, lambda _: None) == uid + 1
    (layout.uids / str(uid)).write_text(GENERATION)
    uids.release(layout, uid, GENERATION)
    assert not process.alive(ref)


@needs_root
def test_after_a_reboot_a_uid_may_be_another_guests(layout: Layout) -> None:
    """The journal of the guest that a power cut ended still names it; allocations were on a tmpfs."""
    other = "43.0.0123abcd"
    uid = uids.allocate(layout, other, lambda _: None)
    ref = spawn("/bin/sleep", "60", who=process.Credentials(uid, 65534), generation=other)
    try:
        while not list(process.of_uid(uid)):
            time.sleep(0.01)
        journal = Journal(layout.journals, Generation.parse(GENERATION))
        journal.acquire(kinds.UID, f"uid:{uid}", uid=uid)
        journal.acquire(kinds.DOMAIN, "domain:vhpc-none", name="vhpc-none", uid=uid)
        assert resources.release_all(layout, journal, ()) == []
        assert process.alive(ref)
        assert list(uids.allocated(layout)) == [(uid, other)]
    finally:
        process.end(ref)


# --- orphans -----------------------------------------------------------------


def test_what_a_job_takes_beside_an_audit_is_no_orphan(layout: Layout) -> None:
    uid = uids.allocate(layout, GENERATION, lambda _: None)
    layout.job(42).mkdir(parents=True)
    images.pin(layout, publish(layout), GENERATION)
    expected = [
        "orphan-folder",
        "orphan-pin",
        "orphan-uid",
    ]  # processes are the whole machine's: not ours to end
    found = [finding for finding in audit.audit(layout, "n1", None) if finding.kind in expected]
    assert sorted(finding.kind for finding in found) == expected
    journal = Journal(layout.journals, Generation.parse(GENERATION))
    journal.acquire(kinds.UID, f"uid:{uid}", uid=uid)
    for finding in found:
        finding.repair()
    assert layout.job(42).is_dir()
    assert list(uids.allocated(layout)) == [(uid, GENERATION)]
    assert len(list(images.pins(layout))) == 1
    journal.released(f"uid:{uid}")
    journal.remove()
    for finding in found:
        finding.repair()
    assert not layout.job(42).exists()
    assert list(uids.allocated(layout)) == []
    assert list(images.pins(layout)) == []


@needs_root
@pytest.mark.parametrize(
    ("running", "purged", "stale"),
    [(False, False, True), (True, False, False), (True, True, True)],
    ids=["its-steps-have-ended", "slurm-ends-its-steps", "slurm-has-purged-it"],
)
def test_a_job_that_is_over_is_cleared_when_nobody_else_will(
    layout: Layout, running: bool, purged: bool, stale: bool
) -> None:
    generation = Generation.parse(f"{os.getpid() + 1_000_000_000}.0.0123abcd")
    Journal(layout.journals, generation).close()
    asked: list[int] = []

    def unknown(job_id: int) -> bool:
        asked.append(job_id)
        return purged

    with stepd(generation.job_id, "extern") if running else contextlib.nullcontext():
        found = [f for f in audit.audit(layout, "n1", {}, unknown) if f.kind == "stale-generation"]
    assert bool(found) is stale
    assert asked == ([generation.job_id] if running else [])


def test_what_is_over_and_was_never_told_is_told(layout: Layout) -> None:
    """A hook can be killed between the end of a journal and its acknowledgement."""
    first = os.getpid() + 1_000_000_000
    told, queued, here = (Generation.parse(f"{first + n}.0.0123abcd") for n in range(3))
    outbox.put(layout.outbox, outbox.Acknowledgement(queued, "n1", clean=True))
    Journal(layout.journals, here).close()
    found = list(audit.unacknowledged(layout, "n1", [told, queued, here]))
    assert [str(told) in finding.what for finding in found] == [True]
    found[0].repair()
    assert {path.stem for path in outbox.pending(layout.outbox)} == {str(told), str(queued)}
    assert list(journal.generations(layout.journals)) == [here]
    assert joblock.has_tombstone(layout, told), "a Prolog that is late must not start it"
    assert list(audit.unacknowledged(layout, "n1", [told, queued, here])) == []


# --- state file --------------------------------------------------------------


def test_control_characters_cannot_forge_state_file_lines(tmp_path: Path) -> None:
    path = tmp_path / "state"
    statefile.write_state(path, {"message": "bad\nstatus=ready\r\x1b[31m", "status": "failed"}, 2001)
    assert path.read_text() == "version=1\nmessage=bad status=ready  [31m\nstatus=failed\n"
    assert statefile.read_state(path)["status"] == "failed"


@needs_root
def test_a_state_file_is_for_root_and_for_the_jobs_user(tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents):
        if str(folder).startswith("/tmp/"):
            folder.chmod(0o755)
    path = tmp_path / "state"
    statefile.write_state(path, {"status": "ready"}, 2001)
    assert path.stat().st_mode & 0o037 == 0, "written by nobody else, read by no group and no other"
    codes = {}
    for uid in (2001, 2002):
        for group in (2001, 0):
            user = process.Credentials(uid, group)
            read = subprocess.run([*process.drop_to(user), "cat", path], capture_output=True, check=False)
            codes[uid, group] = read.returncode
    assert codes == {(2001, 2001): 0, (2001, 0): 0, (2002, 2001): 1, (2002, 0): 1}


def test_a_very_long_message_is_cut_at_a_character(tmp_path: Path) -> None:
    path = tmp_path / "state"
    statefile.write_state(path, {"message": "ü" * 5000}, 2001)
    assert statefile.read_state(path)["message"] == "ü" * 2000


# --- shares ------------------------------------------------------------------


def test_home_and_site_paths_are_shared_outermost_first() -> None:
    config = Shares(site=("/scratch", "/sw"), read_only=("/sw",))
    found, notes = shares.wanted(config, account(), "/data/run7")
    assert [(s.path, s.why, s.read_only) for s in found] == [
        ("/scratch", "site", False),
        ("/sw", "site", True),
        ("/home/alice", "home", False),
        ("/data/run7", "workdir", False),
    ]
    assert notes == []


@pytest.mark.parametrize("work_dir", ["/home/alice", "/home/alice/run/../x", "/scratch/alice"])
def test_a_working_directory_in_a_share_is_not_shared_twice(work_dir: str) -> None:
    found, _ = shares.wanted(Shares(site=("/scratch",)), account(), work_dir)
    assert [s.why for s in found] == ["site", "home"]


@pytest.mark.parametrize(
    "path", ["/", "/usr/src", "/etc", "/tmp", "/home", "/home/alice/../../etc", "relative", "/proc/1"]
)
def test_the_guests_own_system_is_never_mounted_over(path: str) -> None:
    found, notes = shares.wanted(Shares(home=False), account(), path)
    assert found == []
    assert len(notes) == 1


# --- console -----------------------------------------------------------------


def test_the_line_that_tells_of_the_death_is_found(tmp_path: Path) -> None:
    path = tmp_path / "console.log"
    path.write_bytes(b"\r\n[ 1.0] Kernel panic - not syncing: VFS\r\n[ 1.1] Call Trace:\r\n[ 1.2] end\r\n")
    assert console.last_words(path) == "Kernel panic - not syncing: VFS"
    path.write_bytes(b"one\r\ntwo \x1b[2J\r\n\r\n")
    assert console.last_words(path) == "two ?[2J"
    path.write_bytes(b"")
    assert console.last_words(path) == ""


def hand_over(log: Path, *targets: Path) -> list[str]:
    """Hand a console over to files; why that failed, for each."""
    requests = [request(console=str(target).replace("%", "%%")) for target in targets]
    copies = [console.hand_over([(0, log)], one, "n1", account(), 1)[0] for one in requests]
    assert [copy.target for copy in copies] == list(map(str, targets))
    return [copy.why_not for copy in copies]


@needs_root
def test_consoles_that_nobody_reads_share_one_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "COPY_TIMEOUT_S", 1.0)
    for parent in [tmp_path, *tmp_path.parents]:
        if str(parent).startswith("/tmp/"):
            parent.chmod(0o755)
    logs = []
    for index in range(8):
        os.mkfifo(tmp_path / (f"out.g{index}" if index else "out"), 0o666)
        logs.append((index, tmp_path / f"log{index}"))
        logs[-1][1].write_text("x" * 3000)
    for path in tmp_path.iterdir():
        os.chown(path, 2001, 2001)
    began = time.monotonic()
    copies = console.hand_over(logs, request(console=str(tmp_path / "out")), "n1", account(), 1)
    assert time.monotonic() - began < 4, "eight times a second, one after the other"
    assert all(copy.why_not for copy in copies)


@needs_root
def test_the_console_is_written_with_the_users_rights(tmp_path: Path) -> None:
    for parent in [tmp_path, *tmp_path.parents]:
        if str(parent).startswith("/tmp/"):
            parent.chmod(0o755)
    home = tmp_path / "home"
    home.mkdir()
    os.chown(home, 2001, 2001)
    log = tmp_path / "console.log"
    log.write_text("x" * 3000)
    victim = tmp_path / "victim"
    victim.write_text("root's")
    (home / "evil").symlink_to(victim)
    assert console.why_not(str(home / "out"), account()) == ""
    assert (home / "out").stat().st_mode & 0o7777 == 0o600
    assert hand_over(log, home / "out") == [""]
    assert (home / "out").stat().st_uid == 2001
    assert (home / "out").stat().st_size == 1024
    assert console.why_not(str(home / "out"), account()) == ""
    assert (home / "out").stat().st_size == 1024
    for target in (home / "evil", tmp_path / "no:thing: else" / "x", Path("/root/x")):
        reason = "No such file or directory" if "thing" in str(target) else "Permission denied"
        assert console.why_not(str(target), account()) == reason
        assert hand_over(log, target) == [reason]
    os.mkfifo(home / "fifo")
    os.chown(home / "fifo", 2001, 2001)
    assert console.why_not(str(home / "fifo"), account()) == "No such device or address"
    assert victim.read_text() == "root's"


def test_a_long_console_is_cut_in_the_middle_with_a_note(tmp_path: Path) -> None:
    path = tmp_path / "console.log"
    path.write_bytes(b"boot\n" + b"-" * 4091 + b"x" * 65536 + b"the end\n")
    subprocess.run(["fallocate", "--punch-hole", "--offset=4096", "--length=65536", path], check=True)
    fd = os.open(path, os.O_RDONLY)
    try:
        pieces = [console.read_on(fd, 5), console.read_on(fd, 1 << 20), console.read_on(fd, 1 << 20)]
        assert pieces == [(0, b"boot\n"), (0, b"-" * 4091), (65536, b"the end\n")]
        assert console.read_on(fd, 1 << 20) == (0, b"")
        with path.open("ab") as more:
            more.write(b"and after\n")
        assert console.read_on(fd, 1 << 20) == (0, b"and after\n")
    finally:
        os.close(fd)


# --- outbox ------------------------------------------------------------------


def test_an_acknowledgement_waits_until_it_is_sent(tmp_path: Path) -> None:
    acks = [outbox.Acknowledgement(Generation(n, 0, "0123abcd"), "n1", clean=True) for n in (1, 2)]
    for ack in acks:
        outbox.put(tmp_path, ack)

    def refuse(_: outbox.Acknowledgement) -> None:
        raise FabricError("vhpcd cannot be reached")

    assert outbox.flush(tmp_path, refuse) == 2
    sent: list[outbox.Acknowledgement] = []
    assert outbox.flush(tmp_path, sent.append) == 0
    assert sent == acks
    assert outbox.pending(tmp_path) == []


def test_two_hooks_may_send_what_waits_at_the_same_time(tmp_path: Path) -> None:
    acks = [outbox.Acknowledgement(Generation(n, 0, "0123abcd"), "n1", clean=True) for n in (1, 2, 3)]
    for ack in acks:
        outbox.put(tmp_path, ack)
    sent: list[outbox.Acknowledgement] = []

    def send_beside_another(ack: outbox.Acknowledgement) -> None:
        sent.append(ack)
        for path in outbox.pending(tmp_path)[:2]:
            path.unlink()

    assert outbox.flush(tmp_path, send_beside_another) == 0
    assert sent == [acks[0], acks[2]]
    assert list(tmp_path.iterdir()) == []


# --- configuration -----------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[guests]\ncolour = 'red'\n", "colour"),
        ("[controller]\nport = 'many'\n", "port"),
        ("[controller]\nport = 70000\n", "port"),
        ("[guests\n", "vhpc.toml"),
    ],
)
def test_a_bad_configuration_is_refused_and_says_where(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "vhpc.toml"
    path.write_text(text)
    with pytest.raises(NodeError, match=said):
        load(path)


# --- timeline ----------------------------------------------------------------


def test_a_process_knows_when_it_was_started() -> None:
    """As its parent saw it, give or take the tick in which the kernel says so."""
    code = "from vhpc_slurm.node.store import timeline; print(timeline.process_began())"
    before = time.time()
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert before - 0.02 <= float(said) <= time.time()


def test_a_stage_that_ended_before_is_kept_as_it_was(layout: Layout) -> None:
    path = layout.timeline(Generation.parse(GENERATION))
    recorder = timeline.Recorder(path, Generation.parse(GENERATION), "n1")
    recorder.note("python", 100.0, 100.5)
    kept = timeline.read_timeline(path)
    assert kept is not None
    assert [(s.name, s.began, s.ended) for s in kept.stages] == [("python", 100.0, 100.5)]


# --- lines -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("/home/a\nDRAIN n1", "/home/a DRAIN n1"),
        ("x\x1b[2Jy", "x\\x1b[2Jy"),
        ("not \udcff UTF-8", "not \\udcff UTF-8"),
        ("\u202eright to left", "\\u202eright to left"),
        ("Grüße 日本", "Grüße 日本"),
    ],
)
def test_a_text_cannot_forge_a_line_or_drive_a_terminal(text: str, line: str) -> None:
    assert UserError("no such folder", text).line() == f"no such folder: {line}"
    record = logging.LogRecord("vhpc", logging.INFO, "", 0, "looked at %s", (text,), None)
    logged = common._OneLine("%(levelname)s %(message)s").format(record)
    assert logged == f"INFO looked at {line}"
    logged.encode()
