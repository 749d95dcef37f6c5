# SPDX-License-Identifier: Apache-2.0
"""A vhpcd process for tests: its own database, port, catalogue and stand-ins for Slurm's commands."""

from __future__ import annotations

import errno
import os
import pwd
import socket
import struct
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakSet

import msgspec
from controller_lab import (
    Munged,
    free_port,
    manifest,
    publish,
    stop,
    wait_for,
)

from vhpc_slurm.cli.site.configuration import toml
from vhpc_slurm.config import Config, load
from vhpc_slurm.config.checkpoint import Checkpoint
from vhpc_slurm.config.controller import Controller
from vhpc_slurm.config.database import Database
from vhpc_slurm.config.fabric import Fabric
from vhpc_slurm.config.images import Images
from vhpc_slurm.controller.api import protocol as wire
from vhpc_slurm.controller.client import ControllerClient
from vhpc_slurm.munge import Munge

ME = pwd.getpwuid(os.geteuid()).pw_name
SLURM_USER = "daemon"
SOURCES = str(Path(__file__).parents[3] / "python")


@dataclass(eq=False)
class Vhpcd:
    """A vhpcd that can be started and stopped, on its own database, port and catalogue."""

    folder: Path
    config: Config
    process: subprocess.Popen[str] | None = None
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    @property
    def client(self) -> ControllerClient:
        return ControllerClient(self.config)

    def start(self) -> Vhpcd:
        with (self.folder / "log").open("a") as log:
            self.process = process = self.spawn(log)
        _started.add(self)
        wait_for(lambda: "listens " in self.log or process.poll() is not None, "vhpcd did not start")
        assert process.poll() is None, self.log
        return self

    def spawn(self, log: Any = subprocess.PIPE) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(), stderr=log, text=True, env=self.own_environment(), cwd=self.folder
        )

    def command(self) -> list[str]:
        module = "vhpc_slurm.controller.server"
        return [sys.executable, "-m", module, "--config", str(self.folder / "vhpc.toml")]

    def own_environment(self) -> dict[str, str]:
        return {"PYTHONPATH": SOURCES, "PATH": "/usr/bin:/bin"} | self.environment

    def stop(self) -> int:
        assert self.process is not None
        code = stop(self.process)
        self.process = None
        (self.folder / "log").write_text("")
        return code

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        self.process = None
        (self.folder / "log").write_text("")

    def raw(self, data: bytes, *, end: bool = True, seconds: float = 15.0) -> bytes:
        """Send bytes as they are; all that comes back."""
        with socket.create_connection(("127.0.0.1", self.config.controller.port), timeout=seconds) as link:
            answer = b""
            try:
                link.sendall(data)
                if end:
                    link.shutdown(socket.SHUT_WR)
                while chunk := link.recv(65536):
                    answer += chunk
            except OSError as err:
                # vhpcd may close it as soon as it has read enough
                if err.errno not in (errno.ECONNRESET, errno.EPIPE, errno.ENOTCONN):
                    raise
            return answer

    def munge(self) -> Munge:
        return Munge(self.config.controller.munge_socket)

    def tell(self, payload: bytes, **how: Any) -> wire.Answer:
        """Send a payload in a credential of our own; the answer."""
        sealed = self.munge().encode(payload, **how)
        frame = self.raw(frame_of(sealed), end=False)
        return wire.read_answer(wire.unwrap(self.munge().decode(frame[4:]).payload, "answer"))


_started: WeakSet[Vhpcd] = WeakSet()


def ended() -> list[str]:
    """Status and log of each vhpcd of a running test that has ended."""
    found = [(one, one.process.poll()) for one in _started if one.process is not None]
    return [f"status {status}\n{one.log}" for one, status in found if status is not None]


def frame_of(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


def make(
    folder: Path,
    daemon: Munged,
    fabric: Fabric | None = None,
    reconcile_interval_s: float = 60.0,
    request_timeout_s: int = 30,
    database: Database | None = None,
    **environment: str,
) -> Vhpcd:
    """A vhpcd that does not run yet; with a fabric where one is named."""
    publish(folder / "catalog", manifest())
    (folder / "bin").mkdir()
    for name in ("squeue", "scontrol", "scancel", "sinfo"):
        (folder / "bin" / name).write_text(f"#!/bin/sh\ncat {folder}/{name}.out 2>/dev/null\n")
        (folder / "bin" / name).chmod(0o755)
    # squeue is also asked about one job: for its name in commands, or whether it exists
    (folder / "bin/squeue").write_text(
        f"""#!/bin/sh
job=$(echo "$*" | sed -n 's/.*--jobs \\([0-9]*\\) .*/\\1/p')
if [ -n "$job" ]; then
    known=$(cat {folder}/squeue.out {folder}/unlisted 2>/dev/null | grep "^$job ")
    [ -z "$known" ] || exec echo "$job $job N/A N/A N/A"
    echo "slurm_load_jobs error: Invalid job id specified" >&2
    exit 1
fi
cat {folder}/squeue.out 2>/dev/null
"""
    )
    config = Config(
        controller=Controller(
            host="127.0.0.1",
            listen="127.0.0.1",
            port=free_port(),
            user=ME,
            slurm_user=SLURM_USER,
            database=str(folder / "state/leases.sqlite"),
            munge_socket=str(daemon.socket),
            request_timeout_s=request_timeout_s,
            reconcile_interval_s=reconcile_interval_s,
            slurm_bin=str(folder / "bin"),
        ),
        images=Images(catalog=str(folder / "catalog")),
        fabric=fabric or Fabric(),
        database=database or Database(),
        checkpoint=Checkpoint(folder=str(folder / "checkpoints")),
    )
    lines = []
    for name in ("controller", "images", "fabric", "database", "checkpoint"):
        settings = msgspec.structs.asdict(getattr(config, name))
        lines += [f"[{name}]", *(f"{key} = {toml(value)}" for key, value in settings.items())]
    (folder / "vhpc.toml").write_text("\n".join(lines))
    assert load(folder / "vhpc.toml") == config
    return Vhpcd(folder, config, environment=environment)
