# SPDX-License-Identifier: Apache-2.0
"""Rights of the process that reads users' files: read its source, write to one folder, and little else."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vhpc_slurm.errors import UserError
from vhpc_slurm.importing import sandbox
from vhpc_slurm.importing.source import Source
from vhpc_slurm.progress import Amount

UNISTD = Path("/usr/include/asm-generic/unistd.h")
PACKAGES = Path(sandbox.__file__).parents[2]
PROBE = r"""
import ctypes, errno, json, os, socket, sys
json.load(sys.stdin)
libc = ctypes.CDLL(None, use_errno=True)

def tried(action):
    try:
        return str(action())
    except OSError as err:
        return errno.errorcode[err.errno]

def call(number, *arguments):
    return errno.errorcode.get(ctypes.get_errno(), "0") if libc.syscall(number, *arguments) < 0 else "done"

print(json.dumps({"step": "with a line\nand \x1b[31mcolour"}))
print(json.dumps({"done": {
    "root": sorted(os.listdir("/")),
    "source": open("/in/source").read(),
    "write_source": tried(lambda: open("/in/source", "w")),
    "write_usr": tried(lambda: open("/usr/x", "w")),
    "shadow": tried(lambda: open("/etc/shadow")),
    "homes": tried(lambda: os.listdir("/root")) + tried(lambda: os.listdir("/home")),
    "outside": tried(lambda: os.listdir(OUTSIDE)),
    "write_out": tried(lambda: open("/out/result", "w").write("x")),
    "socket": tried(socket.socket),
    "unshare": call(272, 0x10000000),
    "clone_newuser": call(56, 0x10000000 | 17, 0, 0, 0, 0),
    "clone3": call(435, 0, 0),
    "mount": call(165, b"/out", b"/in", b"tmpfs", 0, 0),
    "ptrace": call(101, 0, 0, 0, 0),
    "bpf": call(321, 0, 0, 0),
    "processes": [name for name in os.listdir("/proc") if name.isdigit()],
    "environment": sorted(os.environ),
    "capabilities": [line.split()[1] for line in open("/proc/self/status") if line.startswith("CapEff")],
}}), flush=True)
"""


def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, timeout_s: float = 60.0, **request: Any
) -> tuple[dict[str, Any], list[str]]:
    monkeypatch.setattr(sandbox, "START", code.replace("{", "{{").replace("}", "}}") + "# {!r}")
    source, out, steps = tmp_path / "source.tar", tmp_path / "out", list[str]()
    source.write_text("the source")
    out.mkdir()
    return sandbox.run_worker(Source.parse(str(source)), out, request, timeout_s, steps.append), steps


@pytest.mark.promise("attack.import-process")
def test_little_is_in_reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secret").write_text("x")
    monkeypatch.setenv("SECRET", "x")
    found, steps = run(tmp_path, monkeypatch, PROBE.replace("OUTSIDE", repr(str(tmp_path))))
    system = {"bin", "dev", "etc", "in", "lib", "lib32", "lib64", "out", "proc", "sbin", "usr"}
    interpreter = {Path(path).parts[1] for path in (sys.prefix, sys.base_prefix, str(PACKAGES))}
    assert set(found.pop("root")) <= system | interpreter
    assert found.pop("source") == "the source"
    assert found.pop("outside") == "ENOENT"
    assert (tmp_path / "out/result").read_text() == "x"
    assert len(found.pop("processes")) <= 3
    assert set(found.pop("environment")) <= {"PATH", "LC_ALL", "TMPDIR", "PWD"}
    assert int(found.pop("capabilities")[0], 16) == 0
    found.pop("homes")
    assert found == {
        "write_source": "EROFS",
        "write_usr": "EROFS",
        "shadow": "ENOENT",
        "write_out": "1",
        "clone3": "ENOSYS",
        **dict.fromkeys(("socket", "unshare", "clone_newuser", "mount", "ptrace", "bpf"), "EPERM"),
    }
    assert steps[0].isprintable()


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import sys; sys.exit('first line\\nlast line')", "its reader ended with status 1: last line"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "its reader ended with status"),
        ("print('{\"done\": 1}')", "its reader ended with status 0"),
        ("print('[1]'); print('nothing')", "its reader ended with status 0: nothing"),
        ('print(\'{"refused": "because"}\')', "because"),
        ("print('x' * (5 << 20))", "its reader wrote too much"),
        ("while True: print('x' * 4000)", "its reader wrote too much"),
    ],
    ids=["exit", "signal", "no-object", "no-json", "refused", "large", "endless"],
)
def test_a_reader_that_misbehaves_ends_the_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, says: str
) -> None:
    with pytest.raises(UserError, match=says):
        run(tmp_path, monkeypatch, code)


FILLS = """
import errno, json, os
def filled():
    try:
        with open("/memory/file", "wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 20))
    except OSError as err:
        return [errno.errorcode[err.errno], os.stat("/memory/file").st_size]
print(json.dumps({"done": {"memory": filled()}}))
"""


def test_a_reader_fills_no_more_memory_than_it_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = run(tmp_path, monkeypatch, FILLS, memory=8 << 20)
    assert found["memory"] == ["ENOSPC", 8 << 20]


def test_amounts_of_a_reader_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    says: list[Any] = [
        ["read", 1 << 20, 4 << 20],
        ["re\x1b[2Jad" * 50, 5, 0],
        ["read", -1, 4],
        ["read", 1, 1 << 80],
        ["read", 1.5, 2],
        ["read", 1],
        {"read": 1},
        7,
    ]
    lines = "; ".join(f"print({json.dumps({'amount': one})!r})" for one in says)
    _, said = run(tmp_path, monkeypatch, f"{lines}; print('{{\"done\": {{}}}}')")
    assert said[0] == "read 1 MiB of 4 MiB (25 %)"
    assert isinstance(said[0], Amount)
    assert (said[0].done, said[0].total) == (1 << 20, 4 << 20)
    assert said[1].isprintable()
    assert len(said) == 2


def test_a_reader_that_hangs_is_killed_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import os, time; os.fork(); open(f'/out/{os.getpid()}', 'w'); time.sleep(1000)"
    with pytest.raises(UserError, match="it took too long"):
        run(tmp_path, monkeypatch, code, timeout_s=3.0)
    assert len(list((tmp_path / "out").iterdir())) == 2
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes()
        except OSError:
            continue
        assert b"open(f'/out/" not in command or b"pytest" in command


def test_the_reader_needs_the_standard_library_only() -> None:
    """-S: without the packages that are installed."""
    code = f"import sys; sys.path.insert(0, {str(PACKAGES)!r}); import vhpc_slurm.importing.worker"
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True)


def test_without_bubblewrap_nothing_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="bwrap is missing"):
        run(tmp_path, monkeypatch, PROBE)


@pytest.mark.skipif(not UNISTD.exists(), reason="linux-libc-dev is not installed: make deps")
def test_the_filter_of_arm_has_the_numbers_of_the_kernels_header() -> None:
    lines = re.findall(r"^#define __NR(?:3264)?_(\w+)\s+(\d+)$", UNISTD.read_text(), re.MULTILINE)
    theirs = {name: int(number) for name, number in lines}
    _, ours = sandbox.CALLS["aarch64"]
    assert {name: theirs[name] for name in ours} == ours
    assert theirs["clone3"] == sandbox.CLONE3
    assert sandbox.CALLS["x86_64"][1].keys() == ours.keys()
