# SPDX-License-Identifier: Apache-2.0
"""vhpc-measure and vhpc-measure-mpi: results, and errors of one line with an exit status."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from pathlib import Path

import pytest

from vhpc_slurm.bench.outputs import pairs

BUILT = Path(os.environ.get("VHPC_GUEST_BIN", "")).parent / "measure"
pytestmark = pytest.mark.skipif(
    not (BUILT / "vhpc-measure").is_file(), reason="programs are not built: run by `make unit`"
)


def measure(*words: str, program: str = "vhpc-measure") -> subprocess.CompletedProcess[str]:
    return subprocess.run([BUILT / program, *words], capture_output=True, text=True, check=False, timeout=60)


def test_the_machine_is_described_as_by_the_kernel() -> None:
    found = pairs(measure("machine").stdout)
    assert found["kernel"] == os.uname().release
    assert found["cpus"] == str(os.cpu_count())
    if platform.machine() == "x86_64":
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        flags = next(line for line in lines if line.startswith("flags"))
        assert (found["hypervisor"] != "none") == (" hypervisor " in flags)
    else:
        assert re.fullmatch("MIDR 0x[0-9a-f]{8}", found["model"])
        assert found.get("hypervisor") in {None, "none", "QEMU", "TCGTCGTCGTCG"}


def test_triad_uses_the_cpus_of_its_mask() -> None:
    cpu = min(os.sched_getaffinity(0))
    done = subprocess.run(
        ["taskset", "-c", str(cpu), BUILT / "vhpc-measure", "triad", "1", "2"],
        capture_output=True,
        text=True,
        check=True,
    )
    found = pairs(done.stdout)
    assert (found["threads"], found["array_mib"]) == ("1", "1")
    assert float(found["triad_mb_s"]) > 0


def test_triad_refuses_arrays_beyond_the_memory() -> None:
    done = measure("triad", "1000000", "1")
    assert (done.returncode, done.stdout) == (1, "")
    assert "MiB are available" in done.stderr


def test_files_writes_the_reported_files_and_removes_them(tmp_path: Path) -> None:
    done = measure("files", str(tmp_path), "2", "7")
    assert (done.returncode, done.stderr) == (0, "")
    assert list(pairs(done.stdout)) == [
        "write_mb_s",
        "read_mb_s",
        "create_per_s",
        "stat_per_s",
        "open_read_per_s",
        "remove_per_s",
    ]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.getuid() != 0, reason="mounts a small tmpfs: run as root")
def test_a_full_file_system_is_an_error_that_leaves_nothing(tmp_path: Path) -> None:
    script = (
        'mount -t tmpfs -o size=1m tmpfs "$0" && "$1" files "$0" 4 3; status=$?; ls -A "$0"; exit $status'
    )
    command = ["unshare", "--mount", "sh", "-c", script, str(tmp_path), str(BUILT / "vhpc-measure")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "vhpc-measure: cannot write 4 MiB: No space left on device\n"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "usage: "),
        (("triad", "1"), "usage: "),
        (("triad", "0", "1"), "MIB is 0, not a number from 1"),
        (("triad", "1x", "1"), "MIB is 1x"),
        (("files", "/tmp", "1", "99999999999999999999"), "COUNT is 99999999999999999999"),
        (("files", "/nowhere", "1", "1"), "cannot create a folder in /nowhere: No such file"),
    ],
)
def test_wrong_arguments_are_one_error(words: tuple[str, ...], says: str) -> None:
    done = measure(*words)
    assert (done.returncode, done.stdout) == (1 if "/nowhere" in words else 2, "")
    assert says in done.stderr


def test_a_host_without_mpi_is_known_by_its_exit_status(tmp_path: Path) -> None:
    """In an empty root, where no library can be found but the C library."""
    program = BUILT / "vhpc-measure-mpi"
    needed = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout.split()
    for path in (Path(word) for word in [*needed, str(program)] if word.startswith("/")):
        (tmp_path / path.parent.relative_to("/")).mkdir(parents=True, exist_ok=True)
        (tmp_path / path.relative_to("/")).write_bytes(path.read_bytes())
        (tmp_path / path.relative_to("/")).chmod(0o755)
    if os.getuid() != 0:
        pytest.skip("changes its root: run as root")
    command = ["chroot", str(tmp_path), str(program), "openmpi", "pingpong", "2", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith("vhpc-measure-mpi: no MPI library is installed")


@pytest.mark.parametrize("words", [(), ("openmpi", "ring", "2", "1"), ("lam", "pingpong", "2", "1")])
def test_wrong_arguments_of_the_mpi_program_are_its_usage(words: tuple[str, ...]) -> None:
    done = measure(*words, program="vhpc-measure-mpi")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("usage: ")
