# SPDX-License-Identifier: Apache-2.0
"""Agent and shim over a socketpair, as fixture ``guest``: the channel's real programs, no guest between them.

All data passes through vhpc-run, vhpc-shim and vhpc-agent; only the
virtio-serial port is a socket, and the agent changes nothing of this machine.
"""

from __future__ import annotations

import itertools
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import IO

import pytest

from pace import until
from vhpc_slurm.node.guest import hold as holding
from vhpc_slurm.node.guest.channel import GuestChannel

ROOT = Path(__file__).resolve().parents[3]
WAIT_S = 30


def built() -> Path | None:
    """Where vhpc-agent, -shim and -run were built: the newest build, plain ones first."""
    named = os.environ.get("VHPC_GUEST_BIN")
    agents = sorted(ROOT.glob("build/**/vhpc-agent"), key=lambda path: -path.stat().st_mtime)
    places = [Path(named)] if named else [path.parent for path in agents]
    sound = [
        p for p in places if all((p / name).is_file() for name in ("vhpc-agent", "vhpc-shim", "vhpc-run"))
    ]
    return next((p for p in sound if "asan" not in str(p)), sound[0] if sound else None)


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = built()
    if found is not None:
        return found
    if shutil.which("cmake") is None:
        pytest.skip("guest/ is not built and cmake is not there")
    build = tmp_path_factory.mktemp("guest-build")
    options = ["-DBUILD_TESTING=OFF", "-DCMAKE_BUILD_TYPE="]
    subprocess.run(["cmake", "-S", ROOT / "guest", "-B", build, *options], check=True, capture_output=True)
    subprocess.run(["cmake", "--build", build], check=True, capture_output=True)
    return build


_serials = itertools.count(1)


def hold(channel: GuestChannel, wait_s: float) -> None:
    """Hold a guest that is alone in its job."""
    holding.prepare(channel, next(_serials), wait_s)
    holding.hold(channel, wait_s)


class Guest:
    """A shim and an agent of our own, and ways to run programs in the 'guest'."""

    def __init__(
        self, programs: Path, folder: Path, agent: bool = True, watched: tuple[int, ...] = ()
    ) -> None:
        self.console = folder / "console.log"
        self.bin, self.folder, self.socket = programs, folder, folder / "run.sock"
        self.sysfs = folder / "sys"
        self.call_socket = folder / "call.sock"
        self.topology = folder / "topology.xml"
        self.cluster = folder / "cluster"
        self.agent_end, shim_end = socket.socketpair()
        self.agent: subprocess.Popen[bytes] | None = None
        with shim_end, socket.socket(socket.AF_UNIX) as listener, self.console.open("wb+") as said:
            listener.bind(str(self.socket))
            listener.listen(64)
            fds = (shim_end.fileno(), listener.fileno(), said.fileno())
            self.shim = subprocess.Popen(
                [
                    programs / "vhpc-shim",
                    f"--agent-fd={fds[0]}",
                    f"--listen-fd={fds[1]}",
                    f"--uid={os.getuid()}",
                    f"--console-fd={fds[2]}",
                    "--console-keep=64",
                    *(f"--watch-fd={fd}" for fd in watched),
                ],
                pass_fds=(*fds, *watched),
            )
        if agent:
            self.start_agent()

    def start_agent(self) -> None:
        fd = self.agent_end.fileno()
        args = ["--no-system", f"--fd={fd}", f"--call-socket={self.call_socket}", f"--sysfs={self.sysfs}"]
        args += [f"--topology-file={self.topology}", f"--cluster-folder={self.cluster}"]
        self.agent = subprocess.Popen([self.bin / "vhpc-agent", *args], pass_fds=(fd,))
        self.agent_end.close()

    def env(self, **more: str) -> dict[str, str]:
        own = {"VHPC_RUN_SOCKET": str(self.socket), "VHPC_CALL_SOCKET": str(self.call_socket)}
        return {**os.environ, **own, **more}

    def run(self, *argv: str, stdin: bytes = b"", **env: str) -> subprocess.CompletedProcess[bytes]:
        command = [str(self.bin / "vhpc-run"), "--", *argv]
        return subprocess.run(
            command, input=stdin, env=self.env(**env), capture_output=True, timeout=WAIT_S, check=False
        )

    def popen(self, *argv: str, **env: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [str(self.bin / "vhpc-run"), "--", *argv],
            env=self.env(**env),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def close(self) -> None:
        self.agent_end.close()
        self.shim.terminate()
        self.shim.wait(WAIT_S)
        if self.agent is not None:
            self.agent.wait(WAIT_S)
            remove_cgroup(self.agent.pid)


CGROUPS = Path("/sys/fs/cgroup/unified" if Path("/sys/fs/cgroup/unified").is_dir() else "/sys/fs/cgroup")


def is_empty(cgroup: Path) -> bool:
    return "populated 0" in (cgroup / "cgroup.events").read_text()


def remove_cgroup(agent_pid: int) -> None:
    """Remove what an agent leaves that was killed, or whose port closed while a session ran."""
    for top in CGROUPS.glob(f"vhpc.{agent_pid}"):
        (top / "cgroup.kill").write_text("1")
        until(partial(is_empty, top), "the end of the script")
        for path in (*(one for one in top.iterdir() if one.is_dir()), top):
            path.rmdir()


class Saved:
    """An agent whose shim can be replaced, as in a guest that is restored: its port does not close."""

    def __init__(self, programs: Path, folder: Path) -> None:
        self.bin, self.folder = programs, folder
        self.agent_end, self.host_end = socket.socketpair()
        self.socket = folder / "none"
        self.shims: list[subprocess.Popen[bytes]] = []
        self.new_shim()
        fd = self.agent_end.fileno()
        args = ["--no-system", f"--fd={fd}", f"--call-socket={folder}/call.sock"]
        self.agent = subprocess.Popen([self.bin / "vhpc-agent", *args], pass_fds=(fd,))
        self.agent_end.close()

    def new_shim(self) -> subprocess.Popen[bytes]:
        self.socket = self.folder / f"run{len(self.shims)}.sock"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(self.socket))
            listener.listen(64)
            fds = (self.host_end.fileno(), listener.fileno())
            args = [f"--agent-fd={fds[0]}", f"--listen-fd={fds[1]}", f"--uid={os.getuid()}"]
            self.shims.append(subprocess.Popen([self.bin / "vhpc-shim", *args], pass_fds=fds))
        return self.shims[-1]

    def control(self) -> GuestChannel:
        return GuestChannel.connect(self.socket, WAIT_S)

    def run(self, stdout: IO[bytes] | int, stderr: IO[bytes] | int, **more: str) -> subprocess.Popen[bytes]:
        env = {**os.environ, "VHPC_RUN_SOCKET": str(self.socket), "VHPC_RUN_SCRIPT": "1", **more}
        env["VHPC_CALL_SOCKET"] = f"{self.folder}/call.sock"
        env["VHPC_RUN_ARGV0"] = str(self.folder / "slurm_script")
        return subprocess.Popen(
            [self.bin / "vhpc-run"],
            env=env,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
        )

    def script(self, text: str) -> None:
        path = self.folder / "slurm_script"
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o700)

    def save_and_restore(self) -> None:
        """Hold the guest; its shim ends; another shim continues it."""
        with self.control() as channel:
            hold(channel, WAIT_S)
        self.restore()

    def restore(self) -> None:
        """The held guest continues with another shim."""
        self.shims[-1].kill()
        self.shims[-1].wait(WAIT_S)
        self.new_shim()
        with self.control() as channel:
            holding.resume(channel, time.time_ns())

    def close(self) -> None:
        self.host_end.close()
        for shim in self.shims:
            shim.terminate()
            shim.wait(WAIT_S)
        self.agent.wait(WAIT_S)
        remove_cgroup(self.agent.pid)


@pytest.fixture
def guest(programs: Path, tmp_path: Path) -> Iterator[Guest]:
    it = Guest(programs, tmp_path)
    yield it
    it.close()


@pytest.fixture
def late_guest(programs: Path, tmp_path: Path) -> Iterator[Guest]:
    """A guest whose agent is not there yet; start_agent() brings it up."""
    it = Guest(programs, tmp_path, agent=False)
    yield it
    it.close()
