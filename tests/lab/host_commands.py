# SPDX-License-Identifier: Apache-2.0
"""Runs `vlab exec` in children of a process that has imported it, which takes a tenth of the CPU time.

The tests run tens of thousands of commands on hosts, most of them to wait for
something, while emulated guests need the same CPUs.
"""

from __future__ import annotations

import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

_LAB = Path(__file__).resolve().parents[2] / "lab"
_PIPE_BYTES = 65536


@dataclass(frozen=True)
class Ended:
    """Exit status and output of a command."""

    code: int
    out: bytes
    err: bytes


class HostCommands:
    """A server that starts commands on hosts; it ends with this process."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, "-S", __file__, str(theirs.fileno())], pass_fds=(theirs.fileno(),)
            )

    def run(self, words: Sequence[str], stdin: bytes, timeout: float) -> Ended:
        """Run `vlab exec` with these arguments, until it and all processes with its output have ended.

        Raises:
            subprocess.TimeoutExpired: that took longer than ``timeout`` seconds; the command was killed.
        """
        out, err, status = os.pipe(), os.pipe(), os.pipe()
        given = [_readable(json.dumps(list(words)).encode()), _readable(stdin), out[1], err[1], status[1]]
        try:
            socket.send_fds(self._control, [b"run"], given)
        finally:
            for fd in given:
                os.close(fd)
        # files by their number: text of standard output, of standard error, the child's pid and exit status
        texts: dict[int, bytes] = {out[0]: b"", err[0]: b"", status[0]: b""}
        end = time.monotonic() + timeout
        try:
            with selectors.DefaultSelector() as waiting:
                for fd in texts:
                    waiting.register(fd, selectors.EVENT_READ)
                while waiting.get_map():
                    ready = waiting.select(max(0.0, end - time.monotonic()))
                    if not ready:
                        for pid in texts[status[0]].split()[:1]:
                            os.kill(int(pid), signal.SIGKILL)
                        raise subprocess.TimeoutExpired(list(words), timeout, texts[out[0]], texts[err[0]])
                    for key, _ in ready:
                        text = os.read(key.fd, 1 << 20)
                        texts[key.fd] += text
                        if not text:
                            waiting.unregister(key.fd)
            _, code = texts[status[0]].split()
            return Ended(int(code), texts[out[0]], texts[err[0]])
        finally:
            for fd in texts:
                os.close(fd)


def _readable(text: bytes) -> int:
    """A descriptor that gives the text: a pipe, or a file if a pipe cannot hold all of it."""
    if len(text) > _PIPE_BYTES:
        fd = os.memfd_create("stdin", os.MFD_CLOEXEC)
        with os.fdopen(os.dup(fd), "wb") as file:
            file.write(text)
        os.lseek(fd, 0, os.SEEK_SET)
        return fd
    reader, writer = os.pipe()
    os.write(writer, text)
    os.close(writer)
    return reader


def _serve(control: socket.socket, execute: Callable[[], int], prepare: Callable[[], None]) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no wait for children: they report how they end
    while True:
        message, fds, _, _ = socket.recv_fds(control, 16, 5)
        if not message:
            return
        prepare()
        if os.fork() == 0:
            control.close()
            _child(execute, *fds)
        for fd in fds:
            os.close(fd)


def _child(execute: Callable[[], int], request: int, stdin: int, out: int, err: int, status: int) -> None:
    os.set_inheritable(status, False)  # processes of the command may outlive it
    os.write(status, f"{os.getpid()} ".encode())
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number, fd in enumerate((stdin, out, err)):
            os.dup2(fd, number)
            os.close(fd)
        with os.fdopen(request, "rb") as text:
            sys.argv = ["vlab", "exec", *json.load(text)]
        code = execute()
    except SystemExit as ended:  # argparse
        code = ended.code if isinstance(ended.code, int) else 1
    finally:
        sys.stderr.flush()
        os.write(status, str(code).encode())
        os._exit(0)


if __name__ == "__main__":
    sys.path[:0] = [str(_LAB), str(_LAB.parent), str(_LAB.parent / "python")]
    command, running = (importlib.import_module(f"vlablib.{name}") for name in ("execcli", "running"))
    lab = importlib.import_module("vlablib.settings").Lab.from_environment()
    _serve(socket.socket(fileno=int(sys.argv[1])), command.main, lambda: running.remember(lab))
