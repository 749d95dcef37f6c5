# SPDX-License-Identifier: Apache-2.0
"""PrologSlurmctld and EpilogSlurmctld with vhpc-hookd and without it, with hooks of this test."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import hook_rig
import pytest
from hook_rig import ROOT, build, gone, listens, until

from vhpc_slurm.cli.host.checks import Level
from vhpc_slurm.cli.host.checks import hookd as doctor
from vhpc_slurm.config import Config
from vhpc_slurm.config.controller import Controller
from vhpc_slurm.hooks import hookd, serving

DAEMON = """
import os, subprocess, sys, time
from pathlib import Path
from vhpc_slurm import config
from vhpc_slurm.hooks import hookd, serving, slurmctld
folder = Path(sys.argv[1])
hookd.SOCKET = folder / "run/socket"
serving.DEFAULT_PATH = config.DEFAULT_PATH = folder / "vhpc.toml"
hookd.HOOKS, hookd.KNOWN = 5, 2
def prolog(config):
    print("hook", os.environ["SLURM_JOB_ID"], os.environ["SPANK_VHPC_IMAGE"], len(os.environ), flush=True)
    print("said", config.controller.port, file=sys.stderr)
    if "PIDS" in os.environ: print(os.getpid(), file=open(os.environ["PIDS"], "a"))
    return int(os.environ.get("STATUS", "0"))
def epilog(config):
    command = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    (folder / "begun").write_text(f"{os.getpid()} {command.pid}")
    while not (folder / "go").exists(): time.sleep(0.02)
    command.kill()
    return 7
def without(config):
    print("told", os.environ["SLURM_HET_JOB_ID"], flush=True)
    return 9
slurmctld.HOOKS.update({"prolog": prolog, "epilog": epilog, "without-guests": without})
sys.exit(hookd.entry())
"""
DIRECT = "python -I -m vhpc_slurm.hooks.start vhpc_slurm.hooks.slurmctld"
JOB = {"PATH": "/usr/bin:/bin", "SLURM_JOB_ID": "7", "SPANK_VHPC_IMAGE": "debian"}


class Rig:
    """A folder with both programs, the Python that they run without vhpc-hookd, and its socket."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.socket = folder, folder / "run/socket"
        (folder / "vhpc.toml").write_text("[controller]\nport = 1234\n")
        python = hook_rig.python(folder)
        for word in ("prolog", "epilog"):
            build(folder / word, "main.c", VHPC_WORD=word, VHPC_PYTHON=python, VHPC_HOOKD_SOCKET=self.socket)
        self.daemon: subprocess.Popen[bytes] | None = None

    def serve(self, package: Path = ROOT / "python") -> subprocess.Popen[bytes]:
        environment = {"PATH": JOB["PATH"], "PYTHONPATH": str(package)}
        self.daemon = subprocess.Popen(
            [sys.executable, "-B", "-c", DAEMON, self.folder], env=environment, cwd="/"
        )
        until(lambda: listens(self.socket))
        return self.daemon

    def start(self, word: str = "prolog", environment: dict[str, str] = JOB) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [self.folder / word], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def run(self, word: str = "prolog", environment: dict[str, str] = JOB) -> tuple[int, str]:
        process = self.start(word, environment)
        out, _ = process.communicate(timeout=60)
        return process.returncode, out

    def children(self) -> set[int]:
        """Pids of vhpc-hookd's children."""
        assert self.daemon is not None
        pids = Path(f"/proc/{self.daemon.pid}/task/{self.daemon.pid}/children").read_text().split()
        return {int(pid) for pid in pids}

    def begun(self) -> tuple[int, int]:
        """Pids of the hook that runs and of its command."""
        path = self.folder / "begun"
        until(lambda: path.exists() and len(path.read_text().split()) == 2)
        hook, command = map(int, path.read_text().split())
        return hook, command


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    (tmp_path / "go").touch()
    if made.daemon is not None:
        made.daemon.kill()
        made.daemon.wait()


def test_a_hook_has_the_environment_and_streams_of_its_program(rig: Rig) -> None:
    rig.serve()
    process = rig.start("prolog", JOB | {"STATUS": "5", "EMPTY": "", "TEXT": "a=b\nc"})
    assert process.communicate(timeout=60) == ("hook 7 debian 6\n", "said 1234\n")
    assert process.returncode == 5


def test_without_hookd_the_hook_runs_in_a_python_of_its_own(rig: Rig) -> None:
    assert rig.run("prolog", JOB | {"STATUS": "3"}) == (3, f"{DIRECT} prolog\n")
    assert rig.run("epilog") == (0, f"{DIRECT} epilog\n")


def test_a_job_without_guests_costs_nothing(rig: Rig) -> None:
    rig.serve()
    del (job := dict(JOB))["SPANK_VHPC_IMAGE"]
    assert rig.run("prolog", job) == (0, "")
    assert rig.run("epilog", job | {"SLURM_HET_JOB_ID": "4"}) == (0, "")
    assert rig.run("prolog", job | {"SLURM_HET_JOB_ID": ""}) == (0, "")


def test_an_empty_image_is_a_request(rig: Rig) -> None:
    assert rig.run("prolog", JOB | {"SPANK_VHPC_IMAGE": ""}) == (0, f"{DIRECT} prolog\n")


@pytest.mark.parametrize("warm", [True, False])
def test_a_component_without_guests_is_announced_and_never_fails(rig: Rig, warm: bool) -> None:
    if warm:
        rig.serve()
    job = {"PATH": JOB["PATH"], "SLURM_HET_JOB_ID": "41", "STATUS": "1"}
    assert rig.run("prolog", job) == (0, "told 41\n" if warm else f"{DIRECT} without-guests\n")


@pytest.mark.promise("hookd.killed")
def test_a_hook_outlives_a_killed_hookd(rig: Rig) -> None:
    daemon = rig.serve()
    process = rig.start("epilog")
    rig.begun()
    daemon.kill()
    daemon.wait()
    (rig.folder / "go").touch()
    assert process.communicate(timeout=60)[0] == ""
    assert process.returncode == 7


@pytest.mark.promise("hookd.killed")
def test_a_killed_hook_runs_again_in_a_python_of_its_own(rig: Rig) -> None:
    rig.serve()
    process = rig.start("epilog")
    os.kill(rig.begun()[0], signal.SIGKILL)
    assert process.communicate(timeout=60)[0] == f"{DIRECT} epilog\n"


@pytest.mark.promise("hookd.killed")
def test_a_hook_and_its_commands_end_with_their_program(rig: Rig) -> None:
    rig.serve()
    process = rig.start("epilog")
    hook, command = rig.begun()
    assert not gone(hook)
    process.kill()
    process.communicate()
    until(lambda: gone(hook))
    until(lambda: gone(command))


@pytest.mark.promise("hookd.killed")
@pytest.mark.long
def test_a_stopped_hookd_delays_a_hook_and_does_not_repeat_it(rig: Rig) -> None:
    daemon = rig.serve()
    daemon.send_signal(signal.SIGSTOP)
    assert rig.run("epilog") == (0, f"{DIRECT} epilog\n")
    daemon.send_signal(signal.SIGCONT)
    assert rig.run("prolog")[1] == "hook 7 debian 3\n"  # served after the one that has gone
    time.sleep(0.3)
    assert not (rig.folder / "begun").exists()


def test_a_large_environment_arrives(rig: Rig) -> None:
    rig.serve()
    job = JOB | {f"LIST{number}": "n" * 100_000 for number in range(12)}
    assert rig.run("prolog", job) == (0, "hook 7 debian 15\n")


def test_many_hooks_run_at_once(rig: Rig) -> None:
    rig.serve()
    processes = [rig.start("prolog", JOB | {"SLURM_JOB_ID": str(number)}) for number in range(60)]
    said = {process.communicate(timeout=60)[0] for process in processes}
    assert said == {f"hook {number} debian 3\n" for number in range(60)}


@pytest.mark.promise("hookd.killed")
def test_a_child_runs_one_hook_after_another(rig: Rig) -> None:
    rig.serve()
    pids = rig.folder / "pids"
    for number in range(12):
        more = {f"MORE{one}": "x" for one in range(number % 3)}
        process = rig.start("prolog", JOB | more | {"PIDS": str(pids), "STATUS": str(number)})
        said = process.communicate(timeout=60)
        assert said == (f"hook 7 debian {5 + number % 3}\n", "said 1234\n")
        assert process.returncode == number
    one, *_ = found = pids.read_text().split()
    assert found[:5] == [one] * 5
    assert len(set(found)) == 3, "a child is replaced after so many hooks"
    until(lambda: len(rig.children()) == 1)


def test_children_that_wait_are_few_and_end_with_hookd(rig: Rig) -> None:
    daemon = rig.serve()
    processes = [rig.start("prolog", JOB) for _ in range(30)]
    assert {process.communicate(timeout=60)[0] for process in processes} == {"hook 7 debian 3\n"}
    # the kernel's list lacks some while others end
    until(lambda: 0 < len(rig.children()) <= hookd.IDLE)
    waiting = rig.children()
    assert waiting
    daemon.kill()
    daemon.wait()
    until(lambda: all(map(gone, waiting)))


def test_with_many_children_further_ones_run_one_hook(rig: Rig) -> None:
    rig.serve()
    busy = [rig.start("epilog") for _ in range(2)]
    until(lambda: len(rig.children()) == 2)
    pids = rig.folder / "pids"
    for _ in range(2):
        assert rig.run("prolog", JOB | {"PIDS": str(pids)})[1] == "hook 7 debian 4\n"
        until(lambda: len(rig.children()) == 2)
    assert len(set(pids.read_text().split())) == 2
    (rig.folder / "go").touch()
    for process in busy:
        process.communicate(timeout=60)
        assert process.returncode == 7


def test_a_child_that_was_killed_while_it_waited_is_replaced(rig: Rig) -> None:
    rig.serve()
    for _ in range(3):
        assert rig.run()[1] == "hook 7 debian 3\n"
        for child in rig.children():
            os.kill(child, signal.SIGKILL)
            until(partial(gone, child))


def test_a_changed_configuration_is_read(rig: Rig) -> None:
    rig.serve()
    ports = ("1234", "4321", "not a number", "77")
    for port in ports:
        (rig.folder / "vhpc.toml").write_text(f"[controller]\nport = {port}\n")
        process = rig.start()
        said = process.communicate(timeout=60)[1]
        assert (said == f"said {port}\n") is port.isdigit()
        assert process.returncode == (0 if port.isdigit() else 1)


def test_a_replaced_package_ends_hookd(rig: Rig, tmp_path: Path) -> None:
    package = tmp_path / "lib"
    shutil.copytree(ROOT / "python", package, ignore=shutil.ignore_patterns("__pycache__"))
    daemon = rig.serve(package)
    assert rig.run()[1].startswith("hook ")
    newer = package / "vhpc_slurm/new.py"
    newer.write_bytes((package / "vhpc_slurm/__init__.py").read_bytes())
    newer.rename(package / "vhpc_slurm/__init__.py")
    assert rig.run() == (0, f"{DIRECT} prolog\n")
    assert daemon.wait(20) == 0


@pytest.mark.parametrize(
    "bytes_sent",
    [
        b"",
        b"\x01",
        struct.pack("=I", 1 << 31),
        struct.pack("=I", 8) + b"no-hook\0",
        struct.pack("=I", 3) + b"a\0",
    ],
)
def test_an_invalid_request_is_dropped(rig: Rig, bytes_sent: bytes) -> None:
    rig.serve()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.connect(str(rig.socket))
        link.settimeout(20)
        link.sendall(bytes_sent)
        link.shutdown(socket.SHUT_WR)
        assert link.recv(1) == b""
    assert rig.run()[0] == 0


def test_a_client_that_leaves_before_the_start_starts_nothing(rig: Rig) -> None:
    rig.serve()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.connect(str(rig.socket))
        link.settimeout(20)
        link.sendall(struct.pack("=I", 7) + b"epilog\0")
        assert link.recv(1) == b"R"
        link.shutdown(socket.SHUT_WR)
        assert link.recv(1) == b""
    assert not (rig.folder / "begun").exists()


def test_the_doctor_says_whether_hookd_serves_slurmuser(rig: Rig) -> None:
    def level(user: str) -> Level:
        return doctor.look(Config(controller=Controller(slurm_user=user)), rig.socket).level

    own = pwd.getpwuid(os.geteuid()).pw_name
    assert level(own) is Level.WARN
    rig.serve()
    assert level(own) is Level.OK
    assert level("nobody") is level("no such user") is Level.WARN
    assert rig.run()[0] == 0


def test_all_parts_name_the_same_socket_and_limit() -> None:
    cmake = (ROOT / "hookd/CMakeLists.txt").read_text()
    assert f'set(VHPC_HOOKD_SOCKET "{hookd.SOCKET}"' in cmake
    assert hookd.SOCKET == doctor.SOCKET
    assert hookd.SOCKET.parent == Path("/run/vhpc-hookd")
    assert "RuntimeDirectory=vhpc-hookd\n" in (ROOT / "systemd/vhpc-hookd.service.in").read_text()
    assert f"LONGEST = {serving.MAX_REQUEST >> 20} * 1024 * 1024" in (ROOT / "hookd/ask.c").read_text()


@pytest.mark.promise("hookd.killed")
@pytest.mark.skipif(os.geteuid() != 0, reason="processes of another user: run as root")
def test_only_root_and_hookd_s_user_are_served(rig: Rig) -> None:
    for folder in (rig.folder, *rig.folder.parents):
        folder.chmod(folder.stat().st_mode | 0o711)
    rig.serve()
    rig.socket.parent.chmod(0o755)
    rig.socket.chmod(0o777)
    done = subprocess.run(
        [rig.folder / "prolog"],
        env=JOB,
        user=65534,
        group=65534,
        extra_groups=[],
        capture_output=True,
        check=True,
    )
    assert done.stdout.decode() == f"{DIRECT} prolog\n"


@pytest.mark.promise("hookd.killed")
@pytest.mark.skipif(os.geteuid() != 0, reason="processes of another user: run as root")
def test_a_job_s_environment_goes_to_no_other_user(rig: Rig) -> None:
    """With a socket of uid 65534 in place of vhpc-hookd's."""
    (rig.folder / "run").mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(rig.socket))
        os.seteuid(65534)
        try:
            listener.listen(1)  # SO_PEERCRED is that of listen(2)
        finally:
            os.seteuid(0)
        process = rig.start()
        assert process.communicate(timeout=60)[0] == f"{DIRECT} prolog\n"
        link, _ = listener.accept()
        with link:
            assert link.recv(1) == b""
