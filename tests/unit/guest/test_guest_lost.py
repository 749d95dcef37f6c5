# SPDX-License-Identifier: Apache-2.0
"""vhpc-run when the guest of a task is gone: the other tasks of the step must end."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from controller_lab import wait_for

if TYPE_CHECKING:
    from guest_rig import Guest

pytest_plugins = ["guest_rig"]
WAIT_S = 30
LINE_S = 1.0
"""Time for the line of a lost guest: srun drops output that it reads after the news of a killed task."""
STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "0"}
STEP |= {"SLURMD_NODENAME": "n5"}


@pytest.fixture
def scancel(tmp_path: Path) -> Path:
    """The calls of a scancel that does what is in the file ``act``, as soon as that is there."""
    folder = tmp_path / "commands"
    folder.mkdir()
    calls = folder / "calls"
    calls.touch()
    program = folder / "scancel"
    program.write_text(
        f'#!/bin/sh\necho "$*" $(env | grep -c ^SCANCEL_) >> {calls}\n. {folder}/act\n', encoding="ascii"
    )
    program.chmod(0o755)
    (folder / "act").write_text("exit 0\n", encoding="ascii")
    return calls


def lose(guest: Guest, calls: Path, *tasks: dict[str, str]) -> list[subprocess.Popen[bytes]]:
    """Programs of a step whose guest ends."""
    runs = []
    for task in tasks:
        env = {**STEP, "VHPC_RUN_COMMAND_PATH": str(calls.parent), "SCANCEL_INTERACTIVE": "1", **task}
        run = guest.popen("sh", "-c", "echo up; exec sleep 1000", **env)
        assert run.stdout is not None
        assert run.stdout.readline() == b"up\n"
        runs.append(run)
    assert guest.agent is not None
    guest.agent.kill()
    return runs


@pytest.mark.promise("step.guest-lost")
def test_the_other_tasks_of_the_step_are_ended(guest: Guest, scancel: Path) -> None:
    (run,) = lose(guest, scancel, {})
    _, err = run.communicate(timeout=WAIT_S)
    assert run.returncode == 125
    line = b"vhpc: the guest of job 7 on n5 is gone (channel closed); this ends step 7.3\n"
    assert err == line
    assert scancel.read_text() == "--quiet 7.3 0\n", "options of the user's own scancel do not count"


@pytest.mark.promise("step.guest-lost")
def test_the_line_reaches_srun_before_the_step_is_ended(guest: Guest, scancel: Path) -> None:
    (run,) = lose(guest, scancel, {})
    assert run.stderr is not None
    assert run.stderr.readline().endswith(b"; this ends step 7.3\n")
    read = time.monotonic()
    wait_for(scancel.read_text, "Slurm is not told")
    assert time.monotonic() - read > 0.9 * LINE_S
    run.communicate(timeout=WAIT_S)


@pytest.mark.parametrize(
    "task",
    [
        {"SLURM_STEP_NUM_TASKS": "1"},
        {"SLURM_STEP_ID": "x; reboot"},
        {"SLURM_NO_KILL": "set"},  # as for srun, when a node fails
    ],
    ids=" ".join,
)
def test_a_step_without_other_tasks_to_end_is_left(guest: Guest, scancel: Path, task: dict[str, str]) -> None:
    (run,) = lose(guest, scancel, task)
    _, err = run.communicate(timeout=WAIT_S)
    assert (run.returncode, err) == (125, b"vhpc: the guest of job 7 on n5 is gone (channel closed)\n")
    assert scancel.read_text() == ""


def test_tasks_that_slurm_ends_meanwhile_print_nothing(guest: Guest, scancel: Path) -> None:
    """All tasks of a guest lose it at once; the step is ended by the first of them."""
    first, last = lose(guest, scancel, {}, {"SLURM_LOCALID": "63"})
    first.communicate(timeout=WAIT_S)
    last.send_signal(signal.SIGTERM)
    _, err = last.communicate(timeout=WAIT_S)
    assert (last.returncode, err) == (125, b"")
    assert scancel.read_text() == "--quiet 7.3 0\n"


def test_a_task_stays_until_slurm_knows(guest: Guest, scancel: Path) -> None:
    (scancel.parent / "act").write_text("exit 1\n", encoding="ascii")
    (run,) = lose(guest, scancel, {})
    wait_for(scancel.read_text, "Slurm is not told")
    with pytest.raises(subprocess.TimeoutExpired):
        run.wait(1)
    assert scancel.read_text() == "--quiet 7.3 0\n"
    run.send_signal(signal.SIGTERM)
    assert run.wait(WAIT_S) == 125


@pytest.mark.promise("step.slurmstepd")
def test_a_task_without_its_slurmstepd_ends_its_program(guest: Guest, scancel: Path) -> None:
    """Nothing else would end it, and other tasks of the step may wait for it."""
    env = {**STEP, "VHPC_RUN_COMMAND_PATH": str(scancel.parent)}
    command = [str(guest.bin / "vhpc-run"), "--", "sh", "-c", "echo $$; exec sleep 1000"]
    with subprocess.Popen(
        ["sh", "-c", '"$@" & wait', "sh", *command], env=guest.env(**env), stdout=subprocess.PIPE
    ) as stepd:
        assert stepd.stdout is not None
        pid = int(stepd.stdout.readline())
        os.kill(pid, 0)
        stepd.kill()
        assert stepd.stdout.read() == b"", "the relay has closed its output"
    wait_for(lambda: not Path(f"/proc/{pid}").exists(), "its program runs on")
    wait_for(lambda: scancel.read_text().endswith("\n"), "Slurm is not told")
    assert scancel.read_text() == "--quiet 7.3 0\n"
