# SPDX-License-Identifier: Apache-2.0
"""The `vhpc` command as another user: in a fork, since the user may not be able to start Python."""

from __future__ import annotations

import encodings.idna  # noqa: F401 - getaddrinfo's, which another user may not be able to import later
import json
import os
import select
import sys
import time
from pathlib import Path
from typing import Any

import rich.bar
import rich.columns
import rich.table
import rich.tree  # noqa: F401

from pace import limit
from vhpc_slurm.cli.jobs import bootline, console, ps, report, reporthtml, timeline  # noqa: F401
from vhpc_slurm.cli.main import main
from vhpc_slurm.controller import client  # noqa: F401
from vhpc_slurm.slurm import userjobs  # noqa: F401

WAIT_S = 60.0


class Forked:
    """A running `vhpc` of a user; its output comes through a pipe."""

    def __init__(self, uid: int, config: Path, *argv: str) -> None:
        out_end, out = os.pipe()
        err_end, err = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            code = 70
            try:
                os.dup2(out, 1)
                os.dup2(err, 2)
                for fd in (out_end, out, err_end, err):
                    os.close(fd)
                sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
                os.environ["VHPC_CONFIG"] = str(config)
                os.chdir("/")
                os.setgroups([])
                os.setresgid(uid, uid, uid)
                os.setresuid(uid, uid, uid)
                code = main(argv)
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(code)
        os.close(out)
        os.close(err)
        self.out, self.err = out_end, err_end

    def read_until(self, text: str) -> str:
        """Standard output until it contains a text."""
        return self._read_until(self.out, text)

    def read_error_until(self, text: str) -> str:
        """Standard error until it contains a text."""
        return self._read_until(self.err, text)

    def _read_until(self, end: int, text: str) -> str:
        seen, deadline = "", time.monotonic() + limit(WAIT_S)
        while text not in seen:
            assert select.select([end], [], [], deadline - time.monotonic())[0], f"only {seen!r}"
            piece = os.read(end, 65536)
            assert piece, f"it ended after {seen!r}"
            seen += piece.decode()
        return seen

    def end(self) -> tuple[int, str, str]:
        """Exit status, standard output and standard error."""
        texts = {self.out: b"", self.err: b""}
        left = set(texts)
        while left:
            ready, _, _ = select.select(list(left), [], [], WAIT_S)
            assert ready, texts
            for fd in ready:
                piece = os.read(fd, 65536)
                texts[fd] += piece
                if not piece:
                    os.close(fd)
                    left.discard(fd)
        _, status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status), texts[self.out].decode(), texts[self.err].decode()


def run(uid: int, config: Path, *argv: str, code: int = 0) -> str:
    """Run vhpc as a user; its output, or the one line on stderr where it fails."""
    ended, out, err = Forked(uid, config, *argv).end()
    assert ended == code, (out, err)
    if code:
        assert err.startswith("vhpc: ")
        assert err.count("\n") == 1
    return err if code else out


def run_json(uid: int, config: Path, *argv: str) -> Any:
    """The document that vhpc prints to a user."""
    return json.loads(run(uid, config, *argv, "--json"))
