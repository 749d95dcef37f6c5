# SPDX-License-Identifier: Apache-2.0
"""Where messages of hooks go that cannot write hooks.log, such as those of the controller."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

import pytest

from vhpc_slurm.config import Config, Paths
from vhpc_slurm.errors import FabricError
from vhpc_slurm.hooks import common


@pytest.fixture
def no_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The log's folder cannot be made, not even by root, as SlurmUser cannot write to root's folder."""
    (tmp_path / "file").touch()
    config = Config(paths=Paths(log=str(tmp_path / "file/log")))
    monkeypatch.setattr(common, "load", lambda: config)
    monkeypatch.setattr(common.log, "handlers", [])
    monkeypatch.setenv("SLURM_JOB_ID", "42")


def refused(_: Config) -> int:
    common.log.info("lease %s", "42.1\nforged")
    raise FabricError("vhpcd does not answer")


@pytest.mark.usefixtures("no_folder")
def test_a_hook_that_cannot_write_the_log_uses_syslog(run_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "SYSLOG", f"{run_dir}/log")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as syslogd:
        syslogd.bind(f"{run_dir}/log")
        syslogd.settimeout(10)
        assert common.main("prolog-slurmctld", refused) == 1
        said = [syslogd.recv(65536).decode() for _ in range(2)]
    # RFC 3164: facility 3 is the daemons', severities 6 and 3 are information and error
    assert said == [
        f"<30>vhpc-prolog-slurmctld[{os.getpid()}]: job 42: INFO lease 42.1 forged",
        f"<27>vhpc-prolog-slurmctld[{os.getpid()}]: job 42: ERROR vhpcd does not answer",
    ]


@pytest.mark.usefixtures("no_folder")
def test_without_syslog_messages_go_to_stderr(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(common, "SYSLOG", str(tmp_path / "no-syslog"))
    assert common.main("prolog-slurmctld", refused) == 1
    assert "job 42: INFO lease 42.1 forged\n" in capsys.readouterr().err


@pytest.mark.usefixtures("no_folder")
def test_a_syslog_that_hangs_does_not_stop_a_hook(
    run_dir: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(common, "SYSLOG", f"{run_dir}/log")
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as syslogd,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as others,
    ):
        syslogd.bind(f"{run_dir}/log")
        others.setblocking(False)
        with contextlib.suppress(BlockingIOError):  # its queue is full
            while True:
                others.sendto(b"x", f"{run_dir}/log")
        assert common.main("prolog-slurmctld", refused) == 1
    assert "job 42: INFO lease 42.1 forged\n" in capsys.readouterr().err


@pytest.mark.promise("hookd.killed")
def test_a_process_that_runs_several_hooks_has_a_log_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common.log, "handlers", [])
    config = Config(paths=Paths(log=str(tmp_path)))
    for job in ("42", "43"):
        monkeypatch.setenv("SLURM_JOB_ID", job)
        assert common.main("prolog-slurmctld", refused, config) == 1
        common.close_log()
    lines = (tmp_path / "hooks.log").read_text().splitlines()
    said = ["INFO lease 42.1 forged", "ERROR vhpcd does not answer"]
    assert [line.partition("] ")[2] for line in lines] == [
        f"job {job}: {text}" for job in ("42", "43") for text in said
    ]
