# SPDX-License-Identifier: Apache-2.0
"""Commands that run on the host for a program in a guest."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from guest_processes import WAIT_S, gone, on_a_terminal

if TYPE_CHECKING:
    from guest_rig import Guest

pytest_plugins = ["guest_rig"]


def test_a_host_command_runs_on_the_host_with_stdio_and_status(guest: Guest) -> None:
    # The middle shell is the guest's, the inner one the host's: its parent is vhpc-run.
    command = f"echo in | {guest.bin}/vhpc-agent --call sh -c 'cat; ps -o comm= -p $PPID; exit 5'; echo $?"
    done = guest.run("sh", "-c", command, VHPC_RUN_COMMANDS="srun:sh")
    assert done.stdout == b"in\nvhpc-run\n5\n"


def test_a_host_command_has_its_callers_limits(guest: Guest) -> None:
    inner = "ulimit -Sn; ulimit -Hn; umask; nice"
    command = (
        f"umask 027; ulimit -n 300; ulimit -Sn 200; nice -n 3 {guest.bin}/vhpc-agent --call sh -c '{inner}'"
    )
    done = guest.run("sh", "-c", command, VHPC_RUN_COMMANDS="sh")
    assert done.stdout.split() == [b"200", b"300", b"0027", b"%d" % (os.nice(0) + 3)]


@pytest.mark.promise("attack.host-call")
def test_only_allowed_commands_run_on_the_host(guest: Guest) -> None:
    for allowed in ("", "srun", "srun:shx:s"):
        done = guest.run(
            f"{guest.bin}/vhpc-agent", "--call", "sh", "-c", "echo no", VHPC_RUN_COMMANDS=allowed
        )
        assert done.returncode == 126
        assert done.stdout == b""
        assert b"guests may not run this command on the host" in done.stderr


@pytest.mark.promise("attack.host-call")
def test_a_host_command_is_found_on_the_hosts_own_path_only(guest: Guest, tmp_path: Path) -> None:
    fake = tmp_path / "bin" / "vhpc-test-command"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\necho mine\n")
    fake.chmod(0o755)
    call, name = f"{guest.bin}/vhpc-agent", fake.name
    path = f"{fake.parent}:{os.environ['PATH']}"
    done = guest.run(call, "--call", name, VHPC_RUN_COMMANDS=name, PATH=path)
    assert done.returncode == 2
    assert guest.run(call, "--call", str(fake), VHPC_RUN_COMMANDS=name, PATH=path).returncode == 2
    done = guest.run(call, "--call", name, VHPC_RUN_COMMANDS=name, VHPC_RUN_COMMAND_PATH=str(fake.parent))
    assert done.stdout == b"mine\n"


def test_a_host_command_ends_when_its_caller_does(guest: Guest, tmp_path: Path) -> None:
    command = (
        f"{guest.bin}/vhpc-agent --call sh -c 'echo $$; exec sleep 1000' > {tmp_path}/pid & "
        f"until [ -s {tmp_path}/pid ]; do sleep 0.1; done; kill -9 $!; sleep 1; cat {tmp_path}/pid"
    )
    done = guest.run("sh", "-c", command, VHPC_RUN_COMMANDS="sh")
    assert gone(int(done.stdout))


def test_a_host_command_outside_of_a_session_is_refused(guest: Guest) -> None:
    assert guest.run("true").returncode == 0  # the agent is up, and listens
    call: list[str | Path] = [guest.bin / "vhpc-agent", "--call", "sh", "-c", "echo no"]
    done = subprocess.run(call, env=guest.env(), capture_output=True, timeout=WAIT_S, check=False)
    assert done.returncode == 126
    assert b"not started by a Slurm job" in done.stderr


def test_a_host_command_on_a_terminal_has_one(guest: Guest) -> None:
    argv = [f"{guest.bin}/vhpc-agent", "--call", "sh", "-c", "stty size; read x; echo host $x; exit 4"]
    screen, status = on_a_terminal(guest, argv, b"33 101\r\n", b"hey\r")
    assert b"33 101\r\n" in screen
    assert b"host hey\r\n" in screen
    assert os.waitstatus_to_exitcode(status) == 4
