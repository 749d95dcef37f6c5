# SPDX-License-Identifier: Apache-2.0
"""Parts of a node that need no guest: processes, locks, uids, images, state files, shares."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from node_rig import GENERATION, account, node_layout, publish
from refused_config import expect_refused
from stepd import needs_root, stepd

from vhpc_slurm.config.shares import Shares
from vhpc_slurm.errors import FabricError, NodeError, UserError
from vhpc_slurm.loglines import OneLine
from vhpc_slurm.model import Generation, Share
from vhpc_slurm.node.guest import shares
from vhpc_slurm.node.host import process
from vhpc_slurm.node.resource import uid as uids
from vhpc_slurm.node.store import disks, joblock, journal, outbox, pins, statefile, timeline
from vhpc_slurm.node.store.journal import Journal
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.reconcile import audit

# Tests that start or count slurmstepds see each other's: one worker runs them all.
pytestmark = pytest.mark.xdist_group("slurmstepd")

layout = node_layout


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


@pytest.mark.promise("clean.twice")
def test_an_epilog_ends_the_prolog_that_holds_the_lock(layout: Layout) -> None:
    prolog = holder(layout, "", 60)
    assert joblock.busy(layout, 42)
    with (
        pytest.raises(NodeError, match=f"held by process {prolog.pid}"),
        joblock.held(layout, 42, timeout_s=0.1),
    ):
        pass
    with joblock.held(layout, 42, timeout_s=60, end_holder=True):
        assert process.start_time(prolog.pid) is None
    prolog.wait(60)
    assert not joblock.busy(layout, 42)


@pytest.mark.promise("clean.twice")
def test_an_epilog_lets_a_health_check_finish(layout: Layout) -> None:
    check = holder(layout, ", brief=True", 0.5)
    with joblock.held(layout, 42, timeout_s=60, end_holder=True):
        assert check.stdout is not None
        assert check.stdout.read() == "done\n"
    check.wait(60)


@pytest.mark.promise("clean.twice")
def test_an_epilog_ends_a_health_check_that_hangs(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joblock, "BRIEF_S", 0.3)
    check = holder(layout, ", brief=True", 60)
    with joblock.held(layout, 42, timeout_s=60, end_holder=True):
        assert check.stdout is not None
        assert check.stdout.read() == ""
    check.wait(60)


def test_a_tombstone_is_of_one_generation(layout: Layout) -> None:
    this, other = Generation(42, 0, "0123abcd"), Generation(42, 0, "4567cdef")
    joblock.write_tombstone(layout, this)
    assert joblock.has_tombstone(layout, this)
    assert not joblock.has_tombstone(layout, other)
    joblock.sweep(layout, older_than_s=3600)
    assert joblock.has_tombstone(layout, this)
    joblock.sweep(layout, older_than_s=-1)
    assert not joblock.has_tombstone(layout, this)


# --- orphans -----------------------------------------------------------------


@pytest.mark.parametrize("name", ["notes", "²", "77"])
def test_an_unknown_file_in_the_jobs_folder_is_removed(layout: Layout, name: str) -> None:
    layout.jobs.mkdir(parents=True, exist_ok=True)
    (layout.jobs / name).touch()
    (layout.jobs / "link").symlink_to("/etc")
    found = [finding for finding in audit.audit(layout, "n1", None) if finding.kind == "orphan-folder"]
    assert {finding.what.split()[0] for finding in found} == {str(path) for path in layout.jobs.iterdir()}
    for finding in found:
        finding.repair()
    assert list(layout.jobs.iterdir()) == []
    assert Path("/etc/passwd").exists()


def test_resources_taken_during_an_audit_are_no_orphans(layout: Layout) -> None:
    uid = uids.allocate(layout, GENERATION, lambda _: None)
    layout.job(42).mkdir(parents=True)
    pins.pin(layout, publish(layout), GENERATION)
    layout.disks.mkdir()
    disk = disks.path(layout, Generation.parse(GENERATION), 0)
    disk.touch()
    (layout.disks / "lost+found").mkdir()
    # processes are the whole machine's: not ours to end
    expected = ["orphan-disk", "orphan-folder", "orphan-pin", "orphan-uid"]
    found = [finding for finding in audit.audit(layout, "n1", None) if finding.kind in expected]
    assert sorted(finding.kind for finding in found) == expected
    journal = Journal(layout.journals, Generation.parse(GENERATION))
    journal.acquire("uid", f"uid:{uid}", uid=uid)
    for finding in found:
        finding.repair()
    assert layout.job(42).is_dir()
    assert list(uids.allocated(layout)) == [(uid, GENERATION)]
    assert len(list(pins.pins(layout))) == 1
    assert disk.exists()
    journal.released(f"uid:{uid}")
    journal.remove()
    for finding in found:
        finding.repair()
    assert not layout.job(42).exists()
    assert list(uids.allocated(layout)) == []
    assert list(pins.pins(layout)) == []
    assert [path.name for path in layout.disks.iterdir()] == ["lost+found"]


@pytest.mark.promise("clean.untold")
@needs_root
@pytest.mark.parametrize(
    ("running", "ended", "stale"),
    [(False, False, True), (True, False, False), (True, True, True)],
    ids=["its-steps-have-ended", "slurm-ends-its-steps", "slurm-waits-for-no-epilog"],
)
def test_a_job_without_an_epilog_is_cleared_by_reconcile(
    layout: Layout, running: bool, ended: bool, stale: bool
) -> None:
    generation = Generation.parse(f"{os.getpid() + 1_000_000_000}.0.0123abcd")
    Journal(layout.journals, generation).close()
    asked: list[int] = []

    def unknown(job_id: int) -> bool:
        asked.append(job_id)
        return ended

    with stepd(generation.job_id, "extern") if running else contextlib.nullcontext():
        found = [f for f in audit.audit(layout, "n1", {}, unknown) if f.kind == "stale-generation"]
    assert bool(found) is stale
    assert asked == ([generation.job_id] if running else [])


@pytest.mark.promise("clean.ack")
def test_ends_that_were_never_reported_are_reported(layout: Layout) -> None:
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
    fields = {"since": "7", "message": "bad\nstatus=ready\r\x1b[31m", "status": "failed"}
    statefile.write_state(path, fields, 2001)
    assert path.read_text() == "version=1\nsince=7\nmessage=bad status=ready  [31m\nstatus=failed\n"
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


def test_each_share_has_the_cache_policy_of_its_folder() -> None:
    config = Shares(
        site=("/scratch", "/sw"), read_only=("/sw",), cache_always=("/sw",), cache_never=("/scratch", "/home")
    )
    found, _ = shares.wanted(config, account(), "/data/run7")
    assert {s.path: s.cache for s in found} == {
        "/scratch": "never",
        "/sw": "always",
        "/home/alice": "never",  # below a folder of the list
        "/data/run7": "auto",
    }


def test_a_share_daemon_gets_its_policy_and_the_sites_threads() -> None:
    config = Shares(virtiofsd="/opt/virtiofsd", threads=4)
    argv = shares.command(config, Share("site0", "/sw", True, "site", "always"), 7)
    assert argv[0] == "/opt/virtiofsd"
    assert {"--fd=7", "--cache=always", "--thread-pool-size=4", "--readonly", "--sandbox=none"} < set(argv)
    argv = shares.command(Shares(), Share("home1", "/home/alice", False, "home"), 7)
    assert {"--cache=auto", "--thread-pool-size=0"} < set(argv)
    assert "--readonly" not in argv


@pytest.mark.promise("shares.fresh")
@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ('site = ["/s"]\ncache_always = ["/s"]', "cache_always has /s, which is not in read_only"),
        ('read_only = ["/s/t"]\ncache_always = ["/s/t"]\ncache_never = ["/s"]', "/s/t is in cache_always"),
        ('site = ["/s"]\nsnapshots = ["/s"]', "snapshots has /s, which is not in read_only"),
        ("threads = 65", "threads"),
    ],
)
def test_settings_that_would_hide_changes_are_refused(tmp_path: Path, lines: str, why: str) -> None:
    expect_refused(tmp_path, f"[shares]\n{lines}\n", why)


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


def test_two_hooks_may_send_the_outbox_at_the_same_time(tmp_path: Path) -> None:
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


def test_a_newer_acknowledgement_outlives_an_earlier_one(tmp_path: Path) -> None:
    """A late Prolog queues one while another hook still sends that of the Epilog."""
    generation = Generation(1, 0, "0123abcd")
    early = outbox.Acknowledgement(generation, "n1", clean=True, note="of the Epilog")
    late = outbox.Acknowledgement(generation, "n1", clean=True, note="of the Prolog")
    outbox.put(tmp_path, early)
    sent: list[outbox.Acknowledgement] = []

    def send(ack: outbox.Acknowledgement) -> None:
        sent.append(ack)
        if ack == early:
            outbox.put(tmp_path, late)

    outbox.flush(tmp_path, send)
    outbox.flush(tmp_path, send)
    assert sent == [early, late]
    assert outbox.pending(tmp_path) == []


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
    expect_refused(tmp_path, text, said)


# --- timeline ----------------------------------------------------------------


def test_a_process_knows_when_it_was_started() -> None:
    """As its parent saw it, except for the kernel's clock tick."""
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


@pytest.mark.promise("attack.log-line")
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
    logged = OneLine("%(levelname)s %(message)s").format(record)
    assert logged == f"INFO looked at {line}"
    logged.encode()
