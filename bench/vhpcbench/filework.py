# SPDX-License-Identifier: Apache-2.0
"""Runs by itself, on a host or in a guest: times file operations in a prepared folder, prints JSON.

``prepare FOLDER`` makes the files, ``run FOLDER ROOT`` times the operations.
ROOT is a folder of the machine's own system for the import's reference. Every
"again" starts after the second for which a guest keeps attributes by default.
"""

import compileall
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

MIB = 1 << 20
BIG_MIB = 256
SMALL = 3000
CREATED = 1000
PACKAGES, MODULES = 50, 10
BODY = b"x" * 2048
KEPT_S = 1.1
BIG = "written.tmp"
IMPORT = (
    "import sys, time; sys.path.insert(0, sys.argv[1]); began = time.perf_counter(); import benchpkg; "
    "print(time.perf_counter() - began)"
)
results: "dict[str, float]" = {}
requests: "dict[str, float]" = {}


def prepare(folder: Path) -> None:
    """Make the files that are measured, and a package of 500 modules with their bytecode."""
    shutil.rmtree(folder, ignore_errors=True)
    for name in ("stat", "open"):
        (folder / name).mkdir(parents=True)
        for number in range(SMALL):
            (folder / name / f"f{number}").write_bytes(BODY)
    top = folder / "package" / "benchpkg"
    top.mkdir(parents=True)
    (top / "__init__.py").write_text("".join(f"from benchpkg import p{n}\n" for n in range(PACKAGES)))
    functions = "".join(f"def function{n}(a, b):\n    return a * {n} + b\n\n" for n in range(20))
    for number in range(PACKAGES):
        part = top / f"p{number}"
        part.mkdir()
        lines = [f"from benchpkg.p{number} import m{n}\n" for n in range(MODULES)]
        (part / "__init__.py").write_text("".join(lines))
        for n in range(MODULES):
            (part / f"m{n}.py").write_text(functions)
    compileall.compile_dir(str(top), quiet=1)
    (folder / BIG).write_bytes(b"")
    if os.geteuid() != 0:
        return
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


def count() -> float:
    """Answered requests of all virtiofs queues of this machine, by their interrupts."""
    lines = Path("/proc/interrupts").read_text().splitlines()
    cpus = len(lines[0].split())
    return sum(sum(map(int, s.split()[1 : cpus + 1])) for s in lines if "-requests." in s)


def timed(name: str, number: int, action: "object") -> None:
    """Time of an action per operation, in milliseconds, and its requests per operation."""
    time.sleep(KEPT_S)
    before, began = count(), time.perf_counter()
    action()  # type: ignore[operator]
    took, asked = time.perf_counter() - began, count() - before
    results[name] = took * 1e3 / number
    requests[name] = asked / number


def write(path: Path) -> None:
    """Sequential write, until it is on the disk."""
    block = memoryview(bytearray(MIB))
    with path.open("wb", buffering=0) as file:
        for _ in range(BIG_MIB):
            file.write(block)
        os.fsync(file.fileno())


def read(path: Path) -> None:
    """Sequential read, not from this machine's own cache if that is a guest's."""
    block = bytearray(MIB)
    with path.open("rb", buffering=0) as file:
        if count():
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while file.readinto(block):
            pass


def stat_all(folder: Path) -> None:
    """One stat of each file."""
    for name in [f"{folder}/f{n}" for n in range(SMALL)]:
        os.stat(name)  # noqa: PTH116 - without the time that pathlib takes


def read_all(folder: Path) -> None:
    """Open, read and close each file."""
    for name in [f"{folder}/f{n}" for n in range(SMALL)]:
        fd = os.open(name, os.O_RDONLY)
        os.read(fd, 4096)
        os.close(fd)


def create_all(folder: Path) -> None:
    """Create files with some content."""
    for name in [f"{folder}/c{n}.tmp" for n in range(CREATED)]:
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        os.write(fd, BODY)
        os.close(fd)


def remove_all(folder: Path) -> None:
    """Remove them."""
    for name in [f"{folder}/c{n}.tmp" for n in range(CREATED)]:
        os.unlink(name)  # noqa: PTH108 - as above


def load(name: str, folder: Path) -> None:
    """Seconds of the import, by itself, in a new Python."""
    time.sleep(KEPT_S)
    before = count()
    command = [sys.executable, "-I", "-S", "-c", IMPORT, str(folder)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    results[name] = float(done.stdout) * 1e3
    requests[name] = count() - before


def run(folder: Path, root: Path) -> None:
    """All operations, in an order in which none warms a cache for a later one."""
    writable = os.access(folder, os.W_OK)
    if writable:
        timed("write", BIG_MIB, lambda: write(folder / BIG))
        timed("read", BIG_MIB, lambda: read(folder / BIG))
        (folder / BIG).write_bytes(b"")
    for name in ("stat", "stat again"):
        timed(name, SMALL, lambda: stat_all(folder / "stat"))
    for name in ("open-read-close", "open-read-close again"):
        timed(name, SMALL, lambda: read_all(folder / "open"))
    if writable:
        timed("create", CREATED, lambda: create_all(folder))
        timed("remove", CREATED, lambda: remove_all(folder))
    load("import", folder / "package")
    load("import again", folder / "package")
    own = root / "bench-package"
    shutil.copytree(folder / "package", own)
    load("import from the own root", own)
    load("import from the own root", own)  # the first one read what copytree wrote
    shutil.rmtree(own)


if __name__ == "__main__":
    if sys.argv[1] == "prepare":
        prepare(Path(sys.argv[2]))
    else:
        run(Path(sys.argv[2]), Path(sys.argv[3]))
        print(json.dumps({"ms": results, "requests": requests}))
