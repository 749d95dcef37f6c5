# SPDX-License-Identifier: Apache-2.0
"""A job with a guest, as vhpc on a login host sees it: Slurm's commands are scripts, the rest is real."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pace import until

if TYPE_CHECKING:
    from guest_rig import Guest

ROOT = Path(__file__).resolve().parents[4]
DIGEST = f"sha256:{'ab' * 32}"
SRUN = r"""#!/bin/bash
echo "$*" >> {folder}/asked
[ -z "$VHPC_IMAGE$SLURM_JOB_ID" ] || exit 99
. {folder}/before
while [[ $1 == --* ]]; do
    [ "$1" != --jobid ] || shift
    case $1 in --ntasks=*) tasks=${{1#*=}};; --input=*) only=${{1#*=}};; esac
    shift
done
program=$1; shift
[ "$program" != /run/vhpc/vhpc-agent ] || program={agent}
set -- "${{@/#\/run\/vhpc\/vhpc-agent/{agent}}}"
export VHPC_JOB_GUESTS=3
for ((task = 0; task < tasks; task++)); do
    [ $task = "${{only:-0}}" ] || SLURM_PROCID=$task VHPC_GUEST=$task "$program" "$@" </dev/null || exit
done
cd {folder}/guest
trap 'trap - TERM; kill -TERM 0; exit 143' TERM  # as srun, it ends the whole step
VHPC_GUEST=${{only:-0}} SLURM_PROCID=${{only:-0}} $RUN "$program" "$@" <&0 &
echo $! > {folder}/pid
wait $!
"""


class StepSite:
    """A login host with a running job 7 on n1 and n2, three guests on each."""

    def __init__(self, folder: Path, programs: Path) -> None:
        self.folder, self.guest = folder, folder / "guest"
        self.guest.mkdir()
        self.before("")
        self.job(f"JobState=RUNNING NodeList=n[1-2] AdminComment=vhpc: image x:latest@{DIGEST}")
        self.says("RUNNING")
        self.script("srun", SRUN.format(folder=folder, agent=programs / "vhpc-agent"))
        (folder / "vhpc.toml").write_text(f'[controller]\nslurm_bin = "{folder}"\n')

    def through(self, guest: Guest) -> None:
        """Let tasks run in a guest, with vhpc-run, vhpc-shim and vhpc-agent between them and srun."""
        self.before(f'export VHPC_RUN_SOCKET={guest.socket}; RUN="{guest.bin}/vhpc-run --"')

    def script(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)
        (self.folder / name).chmod(0o755)

    def before(self, text: str) -> None:
        """Shell commands that srun runs first."""
        (self.folder / "before").write_text(text)

    def job(self, fields: str, uid: int = os.getuid()) -> None:
        self.script(
            "scontrol", f"#!/bin/sh\necho 'JobId=7 JobName=x UserId=who({uid}) GroupId=g(1) {fields}'\n"
        )

    def says(self, state: str) -> None:
        """The job's state as squeue shows it."""
        self.script("squeue", f"#!/bin/sh\necho '7|{state}|None|n[1-2]'\n")

    def asked(self) -> str:
        return (self.folder / "asked").read_text()

    def step(self) -> int:
        """The process of the step; srun writes its pid after it has started it."""
        file = self.folder / "pid"
        return int(until(lambda: file.exists() and file.read_text(), "the step"))

    def start(
        self, *words: str, stdin: int = subprocess.DEVNULL, stdout: int = subprocess.PIPE
    ) -> subprocess.Popen[bytes]:
        """Start the vhpc command."""
        environment = os.environ | {
            "PYTHONPATH": str(ROOT / "python"),
            "VHPC_CONFIG": str(self.folder / "vhpc.toml"),
            "VHPC_IMAGE": "of-the-caller",
            "SLURM_JOB_ID": "8",
            "VHPC_DEBUG": "1",
        }
        # background shells ignore SIGINT, and so would the command
        command = ["env", "--default-signal=INT", sys.executable, "-m", "vhpc_slurm.cli.main", *words]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command, env=environment, stdin=stdin, stdout=stdout, stderr=pipe, cwd=self.folder, bufsize=0
        )

    def run(self, *words: str, stdin: bytes = b"") -> tuple[int, bytes, str]:
        """Run it to its end; returns exit status, output, and what it said."""
        out, err = (process := self.start(*words, stdin=subprocess.PIPE)).communicate(stdin, timeout=60)
        return process.returncode, out, err.decode()


@pytest.fixture
def site(tmp_path: Path, programs: Path) -> StepSite:
    return StepSite(tmp_path, programs)
