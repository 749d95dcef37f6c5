"""Runs on the node, as `python3 -c`: one plain guest, one measurement, the result as JSON."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

DEADLINE_S = 120
PORT = "/run/vhpc-bench.sock"


def main() -> int:
    """Start QEMU as ordered in argv[1], measure, end it."""
    order = json.loads(sys.argv[1])
    pin = ["taskset", "-c", order["cpus"]] if order["cpus"] else []
    with tempfile.TemporaryDirectory() as folder:
        console = Path(folder, "console")
        began = time.monotonic()
        with console.open("wb") as errors:
            qemu = subprocess.Popen(
                [*pin, *order["argv"]], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors
            )
        try:
            if order["size"]:
                seconds, said = transfer(order["size"], Path(folder, "out"))
            else:
                seconds, said = wait_for(qemu, order["marker"].encode(), began)
        finally:
            qemu.kill()
            qemu.wait()
        said += console.read_bytes()
    print(json.dumps({"seconds": seconds, "console": said.decode(errors="replace")[-500:]}))
    return 0


def wait_for(qemu: "subprocess.Popen[bytes]", marker: bytes, began: float) -> "tuple[float | None, bytes]":
    """Seconds until the console says the marker, and what it said."""
    assert qemu.stdout is not None
    said = b""
    while marker not in said and time.monotonic() - began < DEADLINE_S:
        piece = os.read(qemu.stdout.fileno(), 4096)
        if not piece:
            return None, said
        said += piece
    return (time.monotonic() - began if marker in said else None), said


def transfer(size: int, path: Path) -> "tuple[float | None, bytes]":
    """Seconds that `size` bytes took into a file, from the byte that says that they begin."""
    until = time.monotonic() + DEADLINE_S
    port = socket.socket(socket.AF_UNIX)
    while True:
        try:
            port.connect(PORT)
            break
        except OSError:
            if time.monotonic() > until:
                return None, b""
            time.sleep(0.02)
    port.settimeout(DEADLINE_S)
    with port, path.open("wb", buffering=0) as out:
        if not port.recv(1):
            return None, b""
        began = time.monotonic()
        buffer = memoryview(bytearray(1 << 20))
        while size > 0:
            n = port.recv_into(buffer)
            if n == 0:
                return None, b""
            out.write(buffer[:n])
            size -= n
    return time.monotonic() - began, b""


if __name__ == "__main__":
    sys.exit(main())
