# SPDX-License-Identifier: Apache-2.0
"""Rights of skopeo while it talks to a registry: open connections, write to one folder, and little else."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from vhpc_slurm.errors import UserError
from vhpc_slurm.importing import fetch
from vhpc_slurm.importing.sandbox import call_filter

PROBE = r"""
import ctypes, errno, json, resource, socket
libc = ctypes.CDLL(None, use_errno=True)

def tried(family):
    try:
        socket.socket(family, socket.SOCK_DGRAM).close()
        return "open"
    except OSError as err:
        return errno.errorcode[err.errno]

def call(number, *arguments):
    return errno.errorcode.get(ctypes.get_errno(), "0") if libc.syscall(number, *arguments) < 0 else "done"

def memory(size):
    try:
        return len(bytearray(size)) == size
    except MemoryError:
        return False

print(json.dumps({
    "families": {family: tried(family) for family in (1, 2, 10, 16, 17, 38, 40)},
    "socketpair": call(53, 1, 1, 0, ctypes.byref((ctypes.c_int * 2)())),
    "others": sorted({call(165, b"/out", b"/tmp", b"tmpfs", 0, 0), call(321, 0), call(101, 0, 0, 0, 0)}),
    "memory": [memory(1 << 28), memory(3 << 30)],
    "files": resource.getrlimit(resource.RLIMIT_NOFILE),
    "core": resource.getrlimit(resource.RLIMIT_CORE),
    "size": resource.getrlimit(resource.RLIMIT_FSIZE)[0],
}))
"""


@pytest.mark.promise("attack.registry")
def test_little_but_connections_is_in_reach(tmp_path: Path) -> None:
    """A probe in the place of skopeo; the numbers are those of socket(2)."""
    with call_filter(network=True) as seccomp:
        argv = fetch.skopeo(seccomp, tmp_path, 1 << 20, "copy")
        argv = [*argv[: argv.index("skopeo")], "/usr/bin/python3", "-I", "-c", PROBE]
        done = subprocess.run(argv, pass_fds=[seccomp], capture_output=True, check=True, timeout=60)
    found = json.loads(done.stdout)
    permitted = {family for family, said in found["families"].items() if said == "open"}
    assert permitted == {"2", "10", "16"}, "IPv4, IPv6, netlink"
    assert {said for said in found["families"].values() if said != "open"} == {"EPERM"}
    assert (found["socketpair"], found["others"]) == ("EPERM", ["EPERM"])
    assert found["memory"] == [True, False]
    assert (found["files"], found["core"], found["size"]) == ([1024, 1024], [0, 0], 1 << 20)


def test_a_container_of_too_many_files_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "FILES_MAX", 100)
    for number in range(101):
        (tmp_path / f"{number}").touch()
    with (
        subprocess.Popen(["/bin/true"], env={**os.environ}) as run,
        pytest.raises(UserError, match="cannot fetch docker://host/a: it has more than 100 files"),
    ):
        fetch._watch(run, "docker://host/a", tmp_path, 1 << 20, 1e12, lambda _: None)
