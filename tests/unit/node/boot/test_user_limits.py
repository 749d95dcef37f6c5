# SPDX-License-Identifier: Apache-2.0
"""A daemon with the user's rights that reaches a limit of the user: the user reads which one."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from node_rig import account, node_layout, spawn
from stepd import needs_root

from vhpc_slurm.errors import UserError
from vhpc_slurm.model import Generation
from vhpc_slurm.node.boot.helpers import LOG, Helpers
from vhpc_slurm.node.host import process, userlimits
from vhpc_slurm.node.store.journal import Journal
from vhpc_slurm.node.store.layout import Layout

pytestmark = needs_root
layout = node_layout


@pytest.fixture
def helpers(layout: Layout, tmp_path: Path) -> Iterator[Helpers]:
    """Of a guest whose daemon for home0 has ended."""
    journal = Journal(layout.journals, Generation(42, 0, "0123abcd"))
    guest: Any = SimpleNamespace(index=0, paths=SimpleNamespace(run_dir=str(tmp_path)))
    none: Any = None
    made = Helpers(layout, journal, guest, account(), 4_100_000, None, none)
    daemon = spawn("/bin/sleep", "60")
    process.end(daemon)
    made._daemons["home0"] = daemon
    yield made
    made.close()
    journal.close()


def say(helpers: Helpers, text: str) -> None:
    """The daemon's pipe has this text."""
    log, stderr = os.pipe2(os.O_CLOEXEC)
    os.write(stderr, text.encode())
    os.close(stderr)
    helpers._logs["home0"] = log


# virtiofsd 1.13.2 with a low RLIMIT_NOFILE, and the text of errno(3) in Rust's and in C's form
@pytest.mark.promise("user.limits")
@pytest.mark.parametrize(
    ("said", "limit"),
    [
        ("Error creating listener: socket error: Too many open files (os error 24)", "RLIMIT_NOFILE"),
        ("Maximum number of file descriptors too small: Limit is 6, must be at least 610", "RLIMIT_NOFILE"),
        ('Os { code: 24, kind: Uncategorized, message: "Too many open files" }', "RLIMIT_NOFILE"),
        ("epoll_ctl: No space left on device (os error 28)", "fs.epoll.max_user_watches = "),
        (
            'RegisterExitEvent(Os { code: 28, message: "No space left on device" })',
            "fs.epoll.max_user_watches",
        ),
        ("failed to spawn thread: Resource temporarily unavailable (os error 11)", "RLIMIT_NPROC"),
    ],
)
def test_a_daemon_that_reached_a_limit_names_it(helpers: Helpers, said: str, limit: str) -> None:
    say(helpers, f"[2026-11-27T00:27:50Z ERROR virtiofsd] {said}\n")
    for _ in range(2):  # a second question gets the same answer
        error = helpers.exhausted()
        assert error is not None
        assert error.kind == UserError.kind
        assert error.what.startswith("the daemon of shared folder home0")
        assert limit in error.why
        assert said in error.why


def test_lines_in_the_shims_log_count(helpers: Helpers) -> None:
    say(helpers, "")
    line = "Too many open files (os error 24)"
    (helpers.run_dir / LOG).write_text(f"vhpc-shim: work1: no\nvhpc-shim: home0: {line}\n")
    error = helpers.exhausted()
    assert error is not None
    assert line in error.why


@pytest.mark.parametrize(
    "said", ["", "libseccomp.so.2: cannot open shared object file", "Too many open files in system"]
)
def test_other_ends_of_a_daemon_are_not_the_users(helpers: Helpers, said: str) -> None:
    say(helpers, said)
    assert helpers.exhausted() is None


@pytest.mark.promise("user.limits")
def test_used_up_epoll_watches_are_found_by_a_trial(
    helpers: Helpers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """virtiofsd and passt need not report it: passt continues, and never answers QEMU."""
    tried: list[list[str]] = []

    def full(argv: list[str], _data: bytes, _timeout_s: float) -> subprocess.CompletedProcess[bytes]:
        tried.append(argv)
        return subprocess.CompletedProcess(argv, errno.ENOSPC, b"", b"")

    say(helpers, "")
    monkeypatch.setattr(process, "run_briefly", full)
    error = helpers.exhausted()
    assert error is not None
    assert "all epoll watches" in error.why
    assert "2001" in " ".join(tried[0]), "as the job's user"


def test_the_trial_itself_works_for_an_ordinary_user() -> None:
    assert userlimits.reached("", account().credentials) == ""
    done = process.run_briefly(
        [*process.drop_to(account().credentials), "/usr/bin/env", "true"], b"", userlimits.TRIAL_S
    )
    assert done is not None
    assert done.returncode == 0


def test_without_daemons_no_trial_is_made(helpers: Helpers, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(process, "run_briefly", refuse)
    assert helpers.exhausted() is None
