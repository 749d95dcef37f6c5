# SPDX-License-Identifier: Apache-2.0
"""Starts and ends the lab and its hosts.

The lab is one process: PID 1 of a pid namespace that contains everything else,
in a network namespace that contains the bridge.  Each host is a PID 1 below it.
So the end of that process ends the lab, and no part of the lab is visible in
the machine's own namespaces.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

from vlablib import cgroups, kernel
from vlablib.machine import Machine, become_host, become_lab_init
from vlablib.report import LabError
from vlablib.running import find
from vlablib.settings import Lab, address, deadline

BRIDGE = "vlab0"
_PREFIX_LENGTH = 24


def start_lab(lab: Lab, tree_fd: int) -> int:
    """Start the lab's own PID 1, which keeps `tree_fd` open; return its pid."""

    def begin() -> None:
        os.setsid()
        os.set_inheritable(tree_fd, True)
        kernel.unshare(kernel.CLONE_NEWNS | kernel.CLONE_NEWNET | kernel.CLONE_NEWPID)
        _fork_on(lambda: become_lab_init(lab))

    _run_apart("the lab", begin)
    pid = _wait_for(lab, "lab")
    _ip(
        pid,
        "link set lo up",
        f"link add {BRIDGE} type bridge forward_delay 0",
        f"link set {BRIDGE} up",
    )
    return pid


def start_host(machine: Machine, lab_pid: int) -> int:
    """Start a host with its network; return the pid of its PID 1."""
    name = machine.name

    def begin() -> None:
        fd = os.pidfd_open(lab_pid)
        kernel.setns(fd, kernel.CLONE_NEWPID | kernel.CLONE_NEWNET)
        os.close(fd)

        def inside() -> None:
            if cgroups.usable(machine.lab):
                cgroups.join(machine.lab, name)
            kernel.unshare(kernel.HOST_NAMESPACES)
            _fork_on(lambda: become_host(machine))

        _fork_on(inside)

    _run_apart(f"host {name}", begin)
    pid = _wait_for(machine.lab, name)
    _ip(
        lab_pid,
        f"link add v-{name} type veth peer name eth0 netns {pid}",
        f"link set v-{name} master {BRIDGE} up",
    )
    _ip(pid, "link set lo up", f"addr add {address(name)}/{_PREFIX_LENGTH} dev eth0", "link set eth0 up")
    return pid


def end(pid: int) -> None:
    """Kill a PID 1 and with it its whole namespace; return when the last process has ended.

    Raises:
        LabError: a process does not end (it is in uninterruptible sleep).
    """
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    # a PID 1 becomes a zombie only after all other processes of its namespace have ended
    for _ in deadline(30):
        try:
            state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return
        if state in "ZX":
            return
    raise LabError(f"process {pid} of the lab does not end; see: /proc/{pid}/stack")


def remove_files(lab: Lab) -> None:
    """Remove all files of a lab that does not run, except the cache."""
    for folder in (lab.data, lab.state):
        if folder.exists():
            shutil.rmtree(folder)
    cgroups.remove(lab)


def enter(pid: int) -> list[str]:
    """Return the argv prefix that runs a command in a host's namespaces."""
    spaces = ("--mount", "--cgroup", "--uts", "--ipc", "--net", "--pid")
    return ["nsenter", f"--target={pid}", *spaces, "--"]


def run(pid: int, command: list[str], *, text: str = "", timeout_s: float = 60) -> str:
    """Run a command as root in a host, return its stdout.

    Raises:
        LabError: the command failed or took too long; contains its stderr.
    """
    # with nsenter the host's own PATH and root apply
    line = [*enter(pid), *command]
    try:
        ended = subprocess.run(
            line,
            check=False,
            input=text,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env=SYSTEM_ENVIRONMENT,
            preexec_fn=partial(cgroups.join_host, pid),
        )
    except subprocess.TimeoutExpired as err:
        raise LabError(f"`{' '.join(command)}` did not end within {timeout_s} s") from err
    if ended.returncode:
        raise LabError(f"`{' '.join(command)}` ended with {ended.returncode}: {ended.stderr.strip()}")
    return ended.stdout


SYSTEM_ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
}


def _ip(pid: int, *lines: str) -> None:
    """Run commands of ip(8) in the network namespace of a process."""
    ended = subprocess.run(
        ["nsenter", f"--target={pid}", "--net", "ip", "-batch", "-"],
        check=False,
        input="\n".join(lines) + "\n",
        capture_output=True,
        text=True,
    )
    if ended.returncode:
        raise LabError(f"ip(8) failed: {ended.stderr.strip()}\nin: {'; '.join(lines)}")


def _fork_on(then: Callable[[], None]) -> None:
    """Continue in a child and end the parent: the child's parent is then PID 1 of the pid namespace."""
    if os.fork():
        os._exit(0)
    then()


def _let_go_of_callers_descriptors() -> None:
    """Close what the caller of vlab has open when this process becomes a host.

    The file of a lock would otherwise stay locked as long as the lab runs: `flock FILE lab/vlab up`.
    """
    for name in [path.name for path in Path("/proc/self/fd").iterdir()]:
        if int(name) > 2:
            with contextlib.suppress(OSError):  # that of the list itself
                os.set_inheritable(int(name), False)


def _run_apart(what: str, begin: Callable[[], None]) -> None:
    """Run `begin` in a child that ends in an exec; raise errors that occur before the exec."""
    reader, writer = os.pipe()  # closed by the exec
    child = os.fork()
    if not child:
        try:
            os.close(reader)
            _let_go_of_callers_descriptors()
            begin()
        except BaseException as err:  # the only way to report it to the parent
            os.write(writer, str(err).encode()[:4000])
        finally:
            os._exit(1)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader, "rb") as pipe:
        complaint = pipe.read().decode(errors="replace")
    if complaint:
        raise LabError(f"cannot start {what}: {complaint}")


def _wait_for(lab: Lab, name: str) -> int:
    for _ in deadline(10):
        pid = find(lab).get(name)
        if pid is not None:
            return pid
    raise LabError(f"{name} ended immediately after its start")
