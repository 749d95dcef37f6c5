# SPDX-License-Identifier: Apache-2.0
"""Prolog and Epilog with the process that an Epilog leaves, and without it, with hooks of this test."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import hook_rig
import pytest
from hook_rig import ROOT, build, gone, listens, until

from vhpc_slurm import files
from vhpc_slurm.config import Config, Host
from vhpc_slurm.hooks import preloaded, preloading

SERVER = """
import os, subprocess, sys, time
from pathlib import Path
from vhpc_slurm import config, files
from vhpc_slurm.hooks import common, preloaded, preloading, serving
folder = Path(sys.argv[1])
preloading.FOLDER, preloading.SOCKET = folder / "run", folder / "run/socket"
serving.DEFAULT_PATH = config.DEFAULT_PATH = folder / "vhpc.toml"
preloaded.LOOK_S = 0.2
def prolog(config):
    print("hook", os.environ["SLURM_JOB_ID"], len(os.environ), time.strftime("%Z"), flush=True)
    print("said", config.controller.port, file=sys.stderr)
    sys.modules["left behind"] = sys
    return int(os.environ.get("STATUS", "0"))
def epilog(config):
    command = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    (folder / "begun").write_text(f"{os.getpid()} {command.pid}")
    while not (folder / "go").exists(): time.sleep(0.02)
    command.kill()
    print("left behind" in sys.modules, Path("/proc/self/comm").read_text().strip(), flush=True)
    return 7
preloaded.HOOKS = {"prolog": lambda config: common.main("prolog", prolog, config),
                   "epilog": lambda config: common.main("epilog", epilog, config)}
lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT)
assert files.try_lock(lock)
sys.exit(preloaded.entry(str(lock), sys.argv[2], str(os.getpriority(os.PRIO_PROCESS, 0))))
"""
JOB = {"PATH": "/usr/bin:/bin", "SLURM_JOB_ID": "7", "TZ": "XYZ1"}
DIRECT = "python -I -m vhpc_slurm.hooks.start vhpc_slurm.hooks."
pytestmark = pytest.mark.promise("hooks.preloaded")


class Rig:
    """A folder with the hooks' program, the Python that it runs alone, and a server's socket."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.socket, self.program = folder, folder / "run/socket", folder / "vhpc-node-hook"
        (folder / "vhpc.toml").write_text("[controller]\nport = 1234\n")
        python = hook_rig.python(folder)
        build(self.program, "node.c", VHPC_PYTHON=python, VHPC_NODE_SOCKET=self.socket)
        self.server: subprocess.Popen[bytes] | None = None

    def serve(self, seconds: int = 600, package: Path = ROOT / "python") -> subprocess.Popen[bytes]:
        environment = {"PATH": JOB["PATH"], "PYTHONPATH": str(package)}
        command = [sys.executable, "-B", "-c", SERVER, str(self.folder), str(seconds)]
        self.server = subprocess.Popen(command, env=environment, cwd="/")
        until(lambda: listens(self.socket))
        return self.server

    def start(self, *before: str, word: str = "prolog", **more: str) -> subprocess.Popen[str]:
        command = [*before, str(self.program), word]
        return subprocess.Popen(
            command, env=JOB | more, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def run(self, *before: str, word: str = "prolog", **more: str) -> tuple[int, str, str]:
        process = self.start(*before, word=word, **more)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    def begun(self) -> tuple[int, int]:
        """Pids of the Epilog that runs and of its command."""
        path = self.folder / "begun"
        until(lambda: path.exists() and len(path.read_text().split()) == 2)
        hook, command = map(int, path.read_text().split())
        return hook, command


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    (tmp_path / "run").mkdir(mode=0o700)
    made = Rig(tmp_path)
    yield made
    (tmp_path / "go").touch()
    if made.server is not None:
        made.server.kill()
        made.server.wait()


def test_a_served_hook_has_environment_streams_and_time_zone(rig: Rig) -> None:
    rig.serve()
    assert rig.run(STATUS="5", TEXT="a=b\nc") == (5, "hook 7 5 XYZ\n", "said 1234\n")
    assert rig.run(TZ="ABC2") == (0, "hook 7 3 ABC\n", "said 1234\n")


def test_a_hook_meets_nothing_of_earlier_ones_and_has_its_name(rig: Rig) -> None:
    rig.serve()
    rig.run()
    (rig.folder / "go").touch()
    assert rig.run(word="epilog")[:2] == (7, "False vhpc-epilog\n")


def test_hooks_run_at_once(rig: Rig) -> None:
    rig.serve()
    epilog = rig.start(word="epilog")
    rig.begun()
    processes = [rig.start(SLURM_JOB_ID=str(number)) for number in range(20)]
    said = {process.communicate(timeout=60)[0] for process in processes}
    assert said == {f"hook {number} 3 XYZ\n" for number in range(20)}
    assert epilog.poll() is None


@pytest.mark.parametrize("word", ["prolog", "epilog"])
def test_without_a_server_a_hook_runs_in_a_python_of_its_own(rig: Rig, word: str) -> None:
    assert rig.run(word=word, STATUS="3") == (3, f"{DIRECT}{word}\n", "")


@pytest.mark.parametrize("words", [(), ("healthcheck",), ("prolog", "epilog")])
def test_other_words_are_refused(rig: Rig, words: tuple[str, ...]) -> None:
    done = subprocess.run([rig.program, *words], env=JOB, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "usage: vhpc-node-hook prolog|epilog" in done.stderr


def test_a_hook_outlives_its_killed_server(rig: Rig) -> None:
    server = rig.serve()
    process = rig.start(word="epilog")
    rig.begun()
    server.kill()
    server.wait()
    (rig.folder / "go").touch()
    process.communicate(timeout=60)
    assert process.returncode == 7


def test_a_killed_hook_is_reported_as_killed(rig: Rig) -> None:
    """As in a Python of its own: slurmd decides what follows."""
    rig.serve()
    process = rig.start(word="epilog")
    os.kill(rig.begun()[0], signal.SIGKILL)
    assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == -signal.SIGKILL


def test_a_hook_and_its_commands_end_with_their_program(rig: Rig) -> None:
    rig.serve()
    process = rig.start(word="epilog")
    hook, command = rig.begun()
    process.kill()
    process.communicate()
    until(lambda: gone(hook) and gone(command))


@pytest.mark.long
def test_a_stopped_server_delays_a_hook_and_does_not_repeat_it(rig: Rig) -> None:
    server = rig.serve()
    server.send_signal(signal.SIGSTOP)
    assert rig.run(word="epilog") == (0, f"{DIRECT}epilog\n", "")
    server.send_signal(signal.SIGCONT)
    until(lambda: rig.run()[1] == "hook 7 3 XYZ\n" or server.poll() is not None)
    time.sleep(0.3)
    assert not (rig.folder / "begun").exists()


def test_it_ends_when_no_hook_comes(rig: Rig) -> None:
    server = rig.serve(seconds=2)
    began = time.monotonic()
    assert rig.run()[0] == 0
    assert server.wait(60) == 0
    assert time.monotonic() - began >= 2
    assert not rig.socket.exists()
    assert rig.run()[1] == f"{DIRECT}prolog\n"


@pytest.mark.parametrize(
    "before",
    [
        ("prlimit", "--nofile=77:77", "--"),
        ("nice", "-n", "3"),
        ("taskset", "-c", "0"),
        ("sh", "-c", 'umask 027; exec "$@"', "sh"),
        ("setpriv", "--bounding-set=-sys_boot", "--"),
        ("unshare", "--mount", "--"),
        ("unshare", "--ipc", "--"),
        ("choom", "-n", "5", "--"),
    ],
    ids=lambda words: words[0] + words[1],
)
@pytest.mark.skipif(os.geteuid() != 0, reason="changes what processes inherit: run as root")
def test_a_client_with_other_properties_runs_its_own_python(rig: Rig, before: tuple[str, ...]) -> None:
    if before[0] == "taskset" and len(os.sched_getaffinity(0)) == 1:
        pytest.skip("one CPU: nothing to restrict a process to")
    server = rig.serve()
    assert rig.run()[1] == "hook 7 3 XYZ\n"
    assert rig.run(*before)[1] == f"{DIRECT}prolog\n"
    # the next Epilog starts one that fits
    assert server.wait(60) == 0


@pytest.mark.parametrize("change", ["replaced", "removed"])
def test_it_ends_with_its_package(rig: Rig, tmp_path: Path, change: str) -> None:
    package = tmp_path / "lib"
    shutil.copytree(ROOT / "python", package, ignore=shutil.ignore_patterns("__pycache__"))
    server = rig.serve(package=package)
    module = package / "vhpc_slurm/__init__.py"
    assert rig.run()[0] == 0
    assert server.poll() is None
    if change == "replaced":
        shutil.copy(module, module.with_suffix(".new"))
        module.with_suffix(".new").rename(module)
    else:
        shutil.rmtree(package)
    assert server.wait(60) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="processes of another user: run as root")
def test_only_root_is_served(rig: Rig) -> None:
    for folder in (rig.folder, *rig.folder.parents):
        folder.chmod(folder.stat().st_mode | 0o711)
    rig.serve()
    rig.socket.parent.chmod(0o755)
    rig.socket.chmod(0o777)
    assert (
        rig.run("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--")[1] == f"{DIRECT}prolog\n"
    )


# --- what an Epilog starts ---------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = tmp_path / "hooks"
    monkeypatch.setattr(preloading, "FOLDER", made)
    for name in ("SOCKET", "LOCK", "OUTPUT"):
        monkeypatch.setattr(preloading, name, made / name.lower())
    return made


def config(seconds: int) -> Config:
    return Config(host=Host(preloaded_hooks_s=seconds))


def own_children() -> set[int]:
    found = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()
    return {int(pid) for pid in found if not gone(int(pid))}


def test_an_epilog_starts_one_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # it would listen where the node's own process does
    monkeypatch.setattr(preloading, "MODULE", "vhpc_slurm.hooks.absent")
    before = own_children()
    preloading.start(config(600))
    until(lambda: own_children() == before)
    assert "No module named 'vhpc_slurm.hooks.absent'" in (folder / "output").read_text()
    assert folder.stat().st_mode & 0o777 == 0o700


def test_no_process_waits_for_hooks_if_preloading_is_off(folder: Path) -> None:
    before = own_children()
    preloading.start(config(0))
    assert own_children() == before
    assert not folder.exists()


def test_a_node_never_has_two_processes_that_wait_for_hooks(folder: Path) -> None:
    before = own_children()
    folder.mkdir()
    with (folder / "lock").open("w") as held:
        assert files.try_lock(held.fileno())
        preloading.start(config(600))
    assert own_children() == before
    assert not (folder / "output").exists()


def test_an_epilog_inside_of_a_job_starts_no_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # of Slurm 24.11 with PrologFlags=RunInJob
    text = "0::/system.slice/slurmstepd.scope/job_12/step_extern/user/task_special\n"
    read = Path.read_text
    monkeypatch.setattr(
        Path, "read_text", lambda path, **kw: text if str(path) == "/proc/self/cgroup" else read(path, **kw)
    )
    preloading.start(config(600))
    assert not folder.exists()


def test_a_failure_to_start_one_is_only_logged(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.write_text("no folder")
    preloading.start(config(600))
    assert "no process waits for the next hooks" in caplog.text


def test_all_parts_name_the_same_socket() -> None:
    cmake = (ROOT / "hookd/CMakeLists.txt").read_text()
    assert f'set(VHPC_NODE_SOCKET "{preloading.SOCKET}"' in cmake
    assert set(preloaded.HOOKS) == {"prolog", "epilog"}
