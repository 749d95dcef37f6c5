# SPDX-License-Identifier: Apache-2.0
"""Runs on the node as `python3 -c`: measures one plain guest, prints the result as JSON."""

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
    """Start QEMU as specified in argv[1], measure, end it."""
    order = json.loads(sys.argv[1])
    pin = ["taskset", "-c", order["cpus"]] if order["cpus"] else []
    cpu: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        console = Path(folder, "console")
        began = time.monotonic()
        with console.open("wb") as errors:
            qemu = subprocess.Popen(
                [*pin, *order["argv"]], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors
            )
        try:
            if order["size"]:
                seconds, said, cpu = transfer(order["size"], Path(folder, "out"), qemu.pid)
            else:
                seconds, said = wait_for(qemu, order["marker"].encode(), began)
        finally:
            qemu.kill()
            qemu.wait()
        said += console.read_bytes()
    result = {"seconds": seconds, "cpu": cpu, "console": said.decode(errors="replace")[-500:]}
    print(json.dumps(result))
    return 0


def wait_for(qemu: "subprocess.Popen[bytes]", marker: bytes, began: float) -> "tuple[float | None, bytes]":
    """Seconds until the console shows the marker, and the console's output."""
    assert qemu.stdout is not None
    said = b""
    while marker not in said and time.monotonic() - began < DEADLINE_S:
        piece = os.read(qemu.stdout.fileno(), 4096)
        if not piece:
            return None, said
        said += piece
    return (time.monotonic() - began if marker in said else None), said


def host_cpu_s(pid: int) -> float:
    """CPU time of QEMU's threads without vCPUs."""
    total = 0.0
    for task in Path(f"/proc/{pid}/task").iterdir():
        name = (task / "comm").read_text()
        if not name.startswith("CPU "):
            total += int((task / "schedstat").read_text().split()[0]) / 1e9
    return total


def transfer(size: int, path: Path, qemu: int) -> "tuple[float | None, bytes, dict[str, float]]":
    """Seconds for `size` bytes into a file, after a byte that marks their start; host CPU seconds."""
    until = time.monotonic() + DEADLINE_S
    port = socket.socket(socket.AF_UNIX)
    while True:
        try:
            port.connect(PORT)
            break
        except OSError:
            if time.monotonic() > until:
                return None, b"", {}
            time.sleep(0.02)
    port.settimeout(DEADLINE_S)
    with port, path.open("wb", buffering=0) as out:
        if not port.recv(1):
            return None, b"", {}
        began, theirs, ours = time.monotonic(), host_cpu_s(qemu), time.process_time()
        buffer = memoryview(bytearray(1 << 20))
        while size > 0:
            n = port.recv_into(buffer)
            if n == 0:
                return None, b"", {}
            out.write(buffer[:n])
            size -= n
        cpu = {"qemu": host_cpu_s(qemu) - theirs, "reader": time.process_time() - ours}
    return time.monotonic() - began, b"", cpu


if __name__ == "__main__":
    sys.exit(main())
