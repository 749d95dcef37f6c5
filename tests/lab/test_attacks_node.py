# SPDX-License-Identifier: Apache-2.0
"""A user against what runs as root on the node: the hooks and the health check."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest
from cluster import Lab
from injection import settled, until

pytestmark = pytest.mark.lab

NODE = "n1"
# A FUSE file system of uid 2001 with one file that can be opened and mapped; a read never ends.
SERVER = """
import ctypes, os, struct, sys
fd = os.open("/dev/fuse", os.O_RDWR)
options = f"fd={fd},rootmode=40000,user_id=2001,group_id=2001,allow_other"
libc = ctypes.CDLL(None, use_errno=True)
if libc.mount(b"nobody", sys.argv[1].encode(), b"fuse.slow", 6, options.encode()) < 0:
    sys.exit(os.strerror(ctypes.get_errno()))
INIT, LOOKUP, GETATTR, OPEN, READ, RELEASE, OPENDIR, FLUSH = 26, 1, 3, 14, 15, 18, 27, 25
def attributes(node):
    mode, size = (0o40755, 0) if node == 1 else (0o100644, 1 << 20)
    return struct.pack("<QQQQQQIIIIIIIIII", node, size, 8, 0, 0, 0, 0, 0, 0, mode, 1, 2001, 2001, 0, 4096, 0)
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
    elif op != READ:
        answer(unique, error=38)
"""
# A process whose environment lies on that file. Kernels before 4.17 let its readers wait without end.
VICTIM = """
import ctypes, mmap, os, time
if "LONG" not in os.environ:
    os.execve("/usr/bin/python3", ["python3", "-c", open("/proc/self/cmdline").read().split(chr(0))[2]],
              {"LONG": "x" * 100000})
fields = open("/proc/self/stat").read().rsplit(")", 1)[1].split()
begin, end = int(fields[47]), int(fields[48])
first = (begin + 8191) & ~4095
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
fd = os.open("/home/alice/slow/file", os.O_RDONLY)
MAP_PRIVATE, MAP_FIXED = 2, 16
for page in range(first, end - 8192, 4096):
    if libc.mmap(page, 4096, mmap.PROT_READ, MAP_PRIVATE | MAP_FIXED, fd, 0) != page:
        raise OSError(ctypes.get_errno(), "mmap")
print("in place", os.getpid(), flush=True)
time.sleep(900)
"""


def printed(lab: Lab, name: str) -> str:
    """What the server, or the victim, has said until now."""
    return lab.run(NODE, "cat", f"/tmp/{name}.out", check=False).out


@pytest.fixture
def victim(lab: Lab) -> Iterator[int]:
    """The id of that process, on the node."""
    background = "</dev/null >/tmp/{0}.out 2>&1 &"
    lab.run(NODE, "mkdir", "-p", "/home/alice/slow", user="alice")
    lab.run(NODE, "sh", "-c", "rm -f /tmp/server.out /tmp/victim.out; cat > /tmp/server.py", stdin=SERVER)
    lab.run(NODE, "sh", "-c", "cat > /tmp/victim.py; chmod 644 /tmp/victim.py", stdin=VICTIM)
    serve = "setsid python3 /tmp/server.py /home/alice/slow " + background.format("server")
    lab.run(NODE, "sh", "-c", serve)
    try:
        until(lambda: "mounted" in printed(lab, "server"), "the file system")
        start = 'setsid python3 -c "$(cat /tmp/victim.py)" ' + background.format("victim")
        lab.run(NODE, "sh", "-c", start, user="alice")
        until(lambda: printed(lab, "victim").endswith("\n"), "the process")
        found = re.fullmatch(r"in place (\d+)\n", printed(lab, "victim"))
        assert found is not None, printed(lab, "victim")
        yield int(found[1])
    finally:
        for name in ("victim", "server"):
            lab.run(NODE, "sh", "-c", f"pkill -KILL -f '[p]ython3.*{name}'", check=False)
        lab.run(NODE, "pkill", "-KILL", "-u", "alice", "python3", check=False)
        lab.run(NODE, "umount", "-l", "/home/alice/slow", check=False)


@pytest.mark.promise("attack.fuse-environ")
def test_a_process_with_its_environment_on_fuse_holds_up_no_hook(lab: Lab, victim: int) -> None:
    assert "/home/alice/slow" in lab.run(NODE, "cat", f"/proc/{victim}/maps").out, "else this shows nothing"
    job = lab.finish("hostname", "-n1", "-w", NODE)
    assert job.output() == f"{NODE}\n"
    began = time.monotonic()
    assert lab.vhpc(NODE, "reconcile", "--check") == []
    assert time.monotonic() - began < 55, "HealthCheckProgram is killed after 60 s"
    settled(lab)
