# SPDX-License-Identifier: Apache-2.0
"""Large output of programs in a guest into files, which reaches vhpc-run through shared memory."""

from __future__ import annotations

import random
import shutil
import subprocess
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING

import pytest
from guest_processes import WAIT_S

from pace import limit

if TYPE_CHECKING:
    from guest_rig import Guest

pytest_plugins = ["guest_rig"]

SIZE = 24 << 20


@pytest.fixture
def content(tmp_path: Path) -> bytes:
    """Bytes of the file `source`; any slip shows."""
    content = random.Random(1).randbytes(SIZE)
    (tmp_path / "source").write_bytes(content)
    return content


def start(guest: Guest, stdout: IO[bytes], *before: str) -> subprocess.Popen[bytes]:
    """A program that writes the file, waits for a line of input, and writes it again."""
    script = f"cat {guest.folder}/source; read line; cat {guest.folder}/source"
    command = [*before, str(guest.bin / "vhpc-run"), "--", "sh", "-c", script]
    return subprocess.Popen(command, env=guest.env(), stdin=subprocess.PIPE, stdout=stdout)


def maps_after_half(run: subprocess.Popen[bytes], out: Path) -> str:
    """Mappings of vhpc-run when it has written the first half."""
    until = time.monotonic() + limit(WAIT_S)
    while out.stat().st_size < SIZE:
        assert time.monotonic() < until, "the output did not arrive"
        time.sleep(0.02)
    return Path(f"/proc/{run.pid}/maps").read_text()


@pytest.mark.parametrize("mode", ["wb", "ab"])
def test_output_to_a_file_is_intact_through_shared_memory(
    guest: Guest, tmp_path: Path, content: bytes, mode: str
) -> None:
    out = tmp_path / "out"
    with out.open(mode) as stdout:
        run = start(guest, stdout)
    assert "memfd:vhpc-output" in maps_after_half(run, out)
    run.communicate(b"\n", timeout=WAIT_S)
    assert run.returncode == 0
    assert out.read_bytes() == content * 2


def test_without_free_descriptors_output_comes_by_the_socket(
    guest: Guest, tmp_path: Path, content: bytes
) -> None:
    if shutil.which("prlimit") is None:
        pytest.skip("prlimit is not there: install util-linux")
    out = tmp_path / "out"
    with out.open("wb") as stdout:
        run = start(guest, stdout, "prlimit", "--nofile=8")
    assert "memfd:vhpc-output" not in maps_after_half(run, out)
    run.communicate(b"\n", timeout=WAIT_S)
    assert run.returncode == 0
    assert out.read_bytes() == content * 2


def test_output_to_a_pipe_needs_no_shared_memory(guest: Guest, content: bytes) -> None:
    done = guest.run("cat", f"{guest.folder}/source")
    assert (done.returncode, done.stdout) == (0, content)
