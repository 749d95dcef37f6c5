# SPDX-License-Identifier: Apache-2.0
"""A child process that answers each line on its stdin with one line, and a deadline for each answer."""
# Decision: A child process reads the fabric

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import IO

MAX_ANSWER = 512 << 20
_CHUNK = 1 << 20
_TOLD = 300
"""Bytes from the end of its stderr that an error shows."""


class LineChild:
    """The child is started when it is first needed, and again after a failure."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self._command = command
        self._environment = environment
        self._child: subprocess.Popen[bytes] | None = None
        self._stderr: IO[bytes] | None = None

    def ask(self, line: bytes, timeout_s: float) -> bytes:
        """Send a line (without its newline) and return the answer.

        Raises:
            OSError: it cannot be started, does not answer in time, or its answer is too long.
            EOFError: it has ended.
        """
        return self._exchange(line, timeout_s, answers=True)

    def say(self, line: bytes, timeout_s: float = 1.0) -> None:
        """Send a line that has no answer; raises the same errors as ``ask``."""
        self._exchange(line, timeout_s, answers=False)

    def _exchange(self, line: bytes, timeout_s: float, *, answers: bool) -> bytes:
        deadline = time.monotonic() + timeout_s
        try:
            child = self._child or self._start()
            assert child.stdin is not None
            assert child.stdout is not None
            with selectors.DefaultSelector() as selector:
                self._send(selector, child.stdin.fileno(), line + b"\n", deadline)
                return self._receive(selector, child.stdout.fileno(), deadline) if answers else b""
        except BrokenPipeError:
            why = self._end()
            raise EOFError(f"it has ended: {why}") from None
        except (OSError, EOFError):
            self._end()
            raise

    def close(self) -> None:
        """End the child."""
        self._end()

    def _start(self) -> subprocess.Popen[bytes]:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - _end closes it
        self._child = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=self._environment,
            bufsize=0,
        )
        assert self._child.stdin is not None
        os.set_blocking(self._child.stdin.fileno(), False)
        return self._child

    def _send(self, selector: selectors.BaseSelector, stdin: int, data: bytes, deadline: float) -> None:
        selector.register(stdin, selectors.EVENT_WRITE)
        left = memoryview(data)
        while left:
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise TimeoutError("it does not read its input")
            left = left[os.write(stdin, left[:_CHUNK]) :]
        selector.unregister(stdin)

    def _receive(self, selector: selectors.BaseSelector, stdout: int, deadline: float) -> bytes:
        selector.register(stdout, selectors.EVENT_READ)
        answer = bytearray()
        while not answer.endswith(b"\n"):
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise TimeoutError("no answer in time")
            chunk = os.read(stdout, _CHUNK)
            if not chunk:
                raise BrokenPipeError
            answer += chunk
            if len(answer) > MAX_ANSWER:
                raise OSError("the answer is too long")
        return bytes(answer)

    def _end(self) -> str:
        """End the child; returns its status and the end of its stderr."""
        child, self._child = self._child, None
        stderr, self._stderr = self._stderr, None
        if child is None or stderr is None:
            return "it was not started"
        assert child.stdin is not None
        assert child.stdout is not None
        with contextlib.suppress(OSError):
            child.stdin.close()
        try:
            child.wait(1)  # it ends with its input, unless it hangs
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        child.stdout.close()
        with stderr:
            stderr.seek(max(0, stderr.seek(0, os.SEEK_END) - _TOLD))
            told = " ".join(stderr.read().decode(errors="replace").split())
        return f"status {child.returncode}" + (f", {told}" if told else "")
