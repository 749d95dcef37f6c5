# SPDX-License-Identifier: Apache-2.0
"""Questions to pyslurm in a child process (``pyslurm_worker``), each with a deadline.

One child answers the questions of all threads, one after the other.  It is
killed when it does not answer in time, dies or sends anything unexpected;
another one is started for the next question.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vhpc_slurm.slurm.port import SlurmError
from vhpc_slurm.slurm.pyslurm_worker import MAX_ANSWER
from vhpc_slurm.undecodable import UNDECODABLE

START_S = 10.0
"""How long the child may take to import pyslurm, in seconds."""
MAX_QUESTIONS = 1000
"""So many questions one child answers: pyslurm does not free all of what it loads."""
KEPT_STDERR = 2000
HINT = "set controller.slurm_adapter = 'scontrol' or 'auto' in vhpc.toml"


class UnusableError(SlurmError):
    """pyslurm cannot be used, or its answer is wrong; Slurm itself may be well."""


class SlowError(SlurmError):
    """No answer within the deadline."""


def without_hint(err: SlurmError) -> str:
    """The error's line without HINT, for a reader who has that setting already, or gets another hint."""
    return SlurmError(err.what, err.why, "" if err.hint == HINT else err.hint).line()


@dataclass(frozen=True)
class Versions:
    """Version of pyslurm, and of the Slurm that it was built with, such as 25.11.2 and 25.11.1."""

    pyslurm: str
    built: str

    def __str__(self) -> str:
        return f"pyslurm {self.pyslurm}" + (f" (built with Slurm {self.built})" if self.built else "")


class Client:
    """pyslurm in a child process; safe to use from several threads."""

    def __init__(self, *, slurm_conf: str = "", timeout_s: float = 5.0, start_s: float = START_S) -> None:
        """``timeout_s`` is the deadline of a question, and of waiting for those of other threads."""
        self._environment = {"LC_ALL": "C.UTF-8", "PATH": "/usr/bin:/bin"}
        if slurm_conf:
            self._environment["SLURM_CONF"] = slurm_conf
        self._timeout_s = timeout_s
        self._start_s = start_s
        self._lock = threading.Lock()
        self._child: _Child | None = None
        self._starts = 0

    @property
    def starts(self) -> int:
        """How many children have been started: with each, versions may have changed."""
        return self._starts

    def versions(self) -> Versions:
        """Versions of the pyslurm that answers; starts the child where none runs.

        Raises:
            UnusableError: pyslurm cannot be imported.
            SlowError: it took too long.
        """
        with self._turn():
            return self._running().versions

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """The answer of the child.

        Raises:
            UnusableError: the child died, or sent no answer that can be read.
            SlowError: no answer in time.
        """
        with self._turn():
            child = self._running()
            try:
                answer = child.ask(question, self._timeout_s)
            except BaseException:
                self._end()
                raise
            if child.asked >= MAX_QUESTIONS:
                self._end()
            return answer

    def close(self) -> None:
        """End the child."""
        with self._lock:
            self._end()

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        if not self._lock.acquire(timeout=self._timeout_s + self._start_s):
            raise SlowError("cannot ask pyslurm", "it still answers other questions")
        try:
            yield
        finally:
            self._lock.release()

    def _running(self) -> _Child:
        if self._child is not None and self._child.process.poll() is not None:
            self._end()
        if self._child is None:
            self._starts += 1
            self._child = _Child(self._environment, self._start_s, 2 * max(self._timeout_s, self._start_s))
        return self._child

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.end()


class _Child:
    """One process of ``pyslurm_worker``."""

    def __init__(self, environment: dict[str, str], start_s: float, limit_s: float) -> None:
        script = Path(__file__).with_name("pyslurm_worker.py")
        path = json.dumps([entry for entry in sys.path if entry.startswith("/")])
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-I", str(script), path, str(limit_s)],
                env=environment,
                cwd="/",
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as err:
            raise UnusableError("cannot start pyslurm", str(err), HINT) from err
        self.asked = 0
        self._stderr = bytearray()
        self._finish = weakref.finalize(self, _end_process, self.process)
        try:
            hello = self._receive(start_s, "cannot import pyslurm")
            self.versions = Versions(str(hello["pyslurm"])[:40], str(hello["built"])[:40])
        except KeyError as err:
            self.end()
            raise UnusableError("cannot use pyslurm", "its process did not tell its version", HINT) from err
        except BaseException:
            self.end()
            raise

    def ask(self, question: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        body = json.dumps(question).encode()
        self.asked += 1
        with contextlib.suppress(BrokenPipeError):  # its last words are read below
            os.write(_stream(self.process.stdin), struct.pack(">I", len(body)) + body)
        return self._receive(timeout_s, "pyslurm did not answer")

    def end(self) -> None:
        """Kill the process, wait for it, close its pipes."""
        self._finish()

    def _receive(self, timeout_s: float, what: str) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        data = bytearray()
        out, err = _stream(self.process.stdout), _stream(self.process.stderr)
        with selectors.DefaultSelector() as selector:
            selector.register(out, selectors.EVENT_READ)
            selector.register(err, selectors.EVENT_READ)
            while not _complete(data, what):
                left = deadline - time.monotonic()
                ready = selector.select(left) if left > 0 else []
                if not ready:
                    hint = "see: scontrol ping; is controller.slurm_conf right?"
                    raise SlowError(what, f"no answer within {timeout_s:g} s", hint)
                for key, _ in ready:
                    piece = os.read(key.fd, 1 << 16)
                    if key.fd == err:
                        self._stderr = (self._stderr + piece)[-KEPT_STDERR:]
                        if not piece:
                            selector.unregister(err)
                    elif piece:
                        data += piece
                    else:
                        raise UnusableError(what, self._last_words(), HINT)
        try:
            return dict(json.loads(data[4:]))
        except (TypeError, *UNDECODABLE) as error:
            raise UnusableError(what, f"what it sent cannot be parsed: {error}", HINT) from error

    def _last_words(self) -> str:
        """Why the process ended; it has closed its output."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(1)
        err = _stream(self.process.stderr)
        os.set_blocking(err, False)
        with contextlib.suppress(OSError):
            self._stderr = (self._stderr + os.read(err, 1 << 16))[-KEPT_STDERR:]
        lines = self._stderr.decode(errors="replace").strip().splitlines()
        status = self.process.poll()
        ended = (
            f"its process was ended by signal {-status}"
            if status and status < 0
            else (f"its process ended with status {status}")
        )
        return f"{ended}: {lines[-1][:300]}" if lines else ended


def _complete(data: bytearray, what: str) -> bool:
    """Whether a frame has been read."""
    if len(data) < 4:
        return False
    size: int = struct.unpack(">I", data[:4])[0]
    if size > MAX_ANSWER or len(data) > 4 + size:
        raise UnusableError(what, "it sent something that is no answer", HINT)
    return len(data) == 4 + size


def _stream(stream: Any) -> int:
    return int(stream.fileno())


def _end_process(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(5)
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
