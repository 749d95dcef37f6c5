# SPDX-License-Identifier: Apache-2.0
"""A FUSE file system of a user whose server takes requests and answers no read; a reader ignores SIGKILL."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

# One file, ``file``; include/uapi/linux/fuse.h, version 7.31.
SERVER = """
import ctypes, os, struct, sys
place, uid = sys.argv[1], int(sys.argv[2])
fd = os.open("/dev/fuse", os.O_RDWR)
options = f"fd={fd},rootmode=40000,user_id={uid},group_id={uid},allow_other"
libc = ctypes.CDLL(None, use_errno=True)
if libc.mount(b"nobody", place.encode(), b"fuse.silent", 6, options.encode()) < 0:
    sys.exit(os.strerror(ctypes.get_errno()))
INIT, LOOKUP, GETATTR, OPEN, READ, OPENDIR, INTERRUPT = 26, 1, 3, 14, 15, 27, 36
def attributes(node):
    mode, size = (0o40755, 0) if node == 1 else (0o100644, 1 << 20)
    return struct.pack("<QQQQQQIIIIIIIIII", node, size, 8, 0, 0, 0, 0, 0, 0, mode, 1, uid, uid, 0, 4096, 0)
def answer(unique, data=b"", error=0):
    os.write(fd, struct.pack("<IiQ", 16 + len(data), -error, unique) + data)
while True:
    request = os.read(fd, 1 << 17)
    _, op, unique, node = struct.unpack_from("<IIQQ", request)
    if op == INIT:
        answer(unique, struct.pack("<IIIIHHIIHH8I", 7, 31, 0, 0, 12, 10, 4096, 0, 0, 0, *[0] * 8))
        print("mounted", flush=True)
    elif op == LOOKUP:
        answer(unique, struct.pack("<QQQQII", 2, 0, 9, 9, 0, 0) + attributes(2))
    elif op == GETATTR:
        answer(unique, struct.pack("<QII", 9, 0, 0) + attributes(node))
    elif op in (OPEN, OPENDIR):
        answer(unique, struct.pack("<QII", 1, 0, 0))
    elif op == READ:
        print("read", flush=True)
    elif op != INTERRUPT:
        answer(unique, error=38)
"""


@contextmanager
def silent_fuse(place: Path, uid: int) -> Iterator[subprocess.Popen[str]]:
    """Mount it; each read is a line ``read`` of the server's output."""
    place.mkdir()
    command = [sys.executable, "-c", SERVER, str(place), str(uid)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        assert server.stderr is not None
        if server.stdout.readline() != "mounted\n":
            pytest.skip(f"no FUSE here ({server.stderr.read()}): run as root, and modprobe fuse")
        yield server
    finally:
        server.kill()
        server.wait()
        subprocess.run(["umount", "-l", place], check=False, capture_output=True)
