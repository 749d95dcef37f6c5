# SPDX-License-Identifier: Apache-2.0
"""Processes that outlive the hook which starts them."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
from node_rig import node_layout, spawn

from pace import limit, until
from vhpc_slurm.errors import NodeError
from vhpc_slurm.model import Generation
from vhpc_slurm.node.host import process
from vhpc_slurm.node.resource.process import Process
from vhpc_slurm.node.store.journal import Entry
from vhpc_slurm.node.store.layout import Layout

pytestmark = pytest.mark.xdist_group("slurmstepd")
layout = node_layout
ALONE = "4711.0.0123abcd"
"""A generation without processes of other tests."""


def test_a_spawned_process_has_a_session_and_a_marker() -> None:
    ref = spawn("/bin/sleep", "30", generation=ALONE)
    try:
        assert os.getsid(ref.pid) == ref.pid
        until(lambda: [found for found, _ in process.marked(ALONE)] == [ref], "the marker", 30)
    finally:
        process.end(ref)
    assert not process.alive(ref)
    assert list(process.marked(ALONE)) == []


def test_a_process_started_during_the_search_is_released(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Prolog was killed before it noted the pid; the starter has forked the process and ended."""
    ref = spawn("/bin/sleep", "60", generation=ALONE)
    until(lambda: list(process.marked(ALONE)), "the marker")
    real, listings = process._pids, []

    def without_it_at_first() -> list[int]:
        listings.append(found := real())
        return [pid for pid in found if pid != ref.pid or len(listings) > 1]

    monkeypatch.setattr(process, "_pids", without_it_at_first)
    try:
        Process().release(
            layout, Generation(4711, 0, "0123abcd"), Entry("process:shim", "process", {"role": "shim"})
        )
        assert not process.alive(ref)
    finally:
        process.end(ref)


def test_a_process_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    ref = spawn("/bin/sh", "-c", f"trap '' TERM; echo up >{tmp_path}/up; while :; do sleep 1; done")
    deadline = time.monotonic() + limit(30)
    while not (tmp_path / "up").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.end(ref, grace_s=0.2)
    assert not process.alive(ref)


def test_a_zombie_that_is_not_reaped_counts_as_dead() -> None:
    """Its tracer may keep a thread from being reaped at all; that costs only a number."""
    child = subprocess.Popen(["true"])
    while f"/proc/{child.pid}/stat" and Path(f"/proc/{child.pid}/stat").read_text().split()[2] != "Z":
        time.sleep(0.01)
    assert process.start_time(child.pid) is None
    process.end(process.ProcessRef(child.pid, 1))
    child.wait()


def test_a_stopped_process_is_distinguished_from_a_running_one() -> None:
    child = subprocess.Popen(["sleep", "30"])
    ref = process.ProcessRef(child.pid, process.start_time(child.pid) or 0)
    try:
        assert not process.is_stopped(ref)
        child.send_signal(signal.SIGSTOP)
        until(lambda: process.is_stopped(ref), "the signal", 30)
        assert process.is_stopped(ref)
        process.end(ref)
        assert not process.alive(ref)
    finally:
        child.kill()
        child.wait()


@pytest.mark.promise("attack.fuse-environ")
def test_a_process_that_cannot_be_read_does_not_hold_up_a_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_SCAN_S", 2.0)
    first, second = sorted(pid for pid in process._pids() if pid != os.getpid())[:2]
    monkeypatch.setattr(process, "_pids", lambda: [first, second])

    def read(pid: int) -> str:
        if pid == first:
            time.sleep(60)  # as on a file system that does not answer
        return "read"

    assert list(process.scan(read)) == [(second, "read")]


def test_a_scan_that_lacks_cpu_time_skips_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A helper that a scan misses outlives its job."""
    monkeypatch.setattr(process, "_SCAN_S", 0.1)
    first, second = sorted(pid for pid in process._pids() if pid != os.getpid())[:2]
    monkeypatch.setattr(process, "_pids", lambda: [first, second])

    def read(_: int) -> str:
        until = time.process_time() + 0.5
        while time.process_time() < until:
            pass
        return "read"

    assert list(process.scan(read)) == [(first, "read"), (second, "read")]


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


@pytest.mark.promise("clean.pid-reuse")
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
def test_ends_by_signals_are_distinguished_from_exits(script: str, number: int) -> None:
    with subprocess.Popen(["sh", "-c", f"read -r _; {script}"], stdin=subprocess.PIPE) as child:
        ref = process.ProcessRef(child.pid, process.start_time(child.pid) or 0)
        assert process.killed_by(ref) == 0
        assert child.stdin is not None
        child.stdin.close()
        assert process.wait_gone(ref, 5)
        assert [process.killed_by(ref), process.killed_by(ref)] == [number, number]
    assert process.killed_by(ref) == 0, "somebody else's child by now"


def test_ending_an_ended_process_succeeds() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    process.end(process.ProcessRef(child.pid, 1))


def test_a_program_that_is_not_installed_is_named() -> None:
    with pytest.raises(NodeError, match="/nowhere/vhpc-confine"):
        spawn("/nowhere/vhpc-confine")
