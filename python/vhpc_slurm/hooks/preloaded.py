# SPDX-License-Identifier: Apache-2.0
"""A process of a compute node with the modules of Prolog and Epilog in memory, which forks for each hook.

Python's start and imports take 0.25 s of CPU time, more than most of what a hook does itself.  An Epilog
starts this process (``preloading``); it ends when no hook has come for some time, or when the package is
replaced.  The hooks' program (``hookd/node.c``) runs a Python of its own without it.

A child serves one client and ends, so no state of a hook reaches another one.  Children do not need this
process, and have the properties that slurmd gave to the Epilog which started it: a client that differs in
any of them is refused, and this process ends, so that a later Epilog starts a suitable one.
"""
# Decision: A process of a compute node forks for its hooks

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from vhpc_slurm.config import Config
from vhpc_slurm.controller import exchange
from vhpc_slurm.domain import render
from vhpc_slurm.hooks import common, epilog, preloading, prolog, serving, start
from vhpc_slurm.hooks.serving import Configuration, Hook
from vhpc_slurm.record import Record

BACKLOG = 128
"""Clients that may wait; more run without this process."""
LOOK_S = 10.0
"""How often to look whether the package was replaced or removed."""
HOOKS: Mapping[str, Hook] = {
    "prolog": partial(common.main, "prolog", prolog.run),
    "epilog": partial(common.main, "epilog", epilog.run),
}
COMM = Path("/proc/self/comm")
"""The name of a process in ps and top."""
_STATUS = (
    *("Umask", "Uid", "Gid", "Groups", "NoNewPrivs", "Seccomp", "Cpus_allowed", "Mems_allowed"),
    *("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"),
)
"""Fields of /proc/PID/status that hooks inherit, and that matter to what they do and start."""
_LINKS = ("root", "ns/cgroup", "ns/ipc", "ns/mnt", "ns/net", "ns/pid", "ns/user", "ns/uts")
_TEXTS = ("cgroup", "limits", "oom_score_adj", "attr/current")


class Inherited(Record, frozen=True):
    """Properties that a hook inherits from slurmd, as texts of /proc.

    ``scheduling``: nice value, real-time priority and policy.
    """

    status: tuple[str, ...]
    links: tuple[str, ...]
    texts: tuple[str, ...]
    scheduling: tuple[str, ...]


def inherited(pid: int) -> Inherited | None:
    """That of a process; None if it cannot be read."""
    folder = Path("/proc") / str(pid)
    try:
        lines = (folder / "status").read_text(encoding="utf-8", errors="replace").splitlines()
        fields = (folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return Inherited(
            tuple(line for line in lines if line.partition(":")[0] in _STATUS),
            tuple(str((folder / name).readlink()) for name in _LINKS),
            tuple(_text(folder / name) for name in _TEXTS),
            (fields[16], fields[37], fields[38]),  # proc(5), from field 3 on
        )
    except (OSError, IndexError):
        return None


def _text(path: Path) -> str:
    """A file of /proc; empty if the kernel has none of this name."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def entry(lock: str, seconds: str, niceness: str) -> int:
    """Process entry point: serve until no hook has come for so many seconds.

    Args:
        lock: descriptor of the locked file.
        seconds: how long to wait for a hook.
        niceness: nice value of hooks.
    """
    installed = start.version()
    start.settled()
    exchange.preload()
    render.prepare()
    configuration = Configuration()
    configuration.current()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the children
    os.setpriority(os.PRIO_PROCESS, 0, int(niceness))
    gc.collect()
    gc.freeze()
    with serving.listen(preloading.SOCKET, BACKLOG) as listener:
        try:
            _serve(listener, int(lock), float(seconds), configuration, installed)
        finally:
            preloading.SOCKET.unlink(missing_ok=True)
    return 0


def _serve(
    listener: socket.socket,
    lock: int,
    seconds: float,
    configuration: Configuration,
    installed: tuple[int, int, int],
) -> None:
    listener.setblocking(False)
    own = inherited(os.getpid())
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        ready = select.select([listener], [], [], min(left, LOOK_S))[0]
        if start.mixed(installed):
            return
        if not ready:
            continue
        try:
            link = listener.accept()[0]
        except OSError:  # the client has gone
            continue
        with link:
            pid, uid = serving.peer(link)
            if not serving.is_allowed(uid) or own is None or inherited(pid) != own:
                return
            configuration.current()  # so that the child need not read it
            with contextlib.suppress(OSError):  # without memory for a child, the client runs its hook itself
                if os.fork() == 0:
                    _work(listener, lock, link, configuration)
        until = time.monotonic() + seconds


def _work(listener: socket.socket, lock: int, link: socket.socket, configuration: Configuration) -> None:
    """Serve the client, in a child; the process ends with it."""
    try:
        listener.close()
        os.close(lock)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setpgid(0, 0)
        link.setblocking(True)
        hooks = {word: partial(_named, word, hook) for word, hook in HOOKS.items()}
        status = serving.serve(link, hooks, configuration)
        if status is not None:
            with contextlib.suppress(OSError):
                link.sendall(bytes([status]))
    finally:
        os._exit(0)


def _named(word: str, hook: Hook, config: Config | None) -> int:
    """Run a hook in a process that has its name."""
    COMM.write_text(f"vhpc-{word}", encoding="utf-8")
    return hook(config)
