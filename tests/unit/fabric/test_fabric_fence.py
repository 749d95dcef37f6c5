# SPDX-License-Identifier: Apache-2.0
"""A vhpcd that was frozen at any line of writing OpenSM's file, and thaws after another has written it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from vhpc_slurm.errors import FabricError
from vhpc_slurm.fabric import partitions
from vhpc_slurm.fabric.fence import ALONE, FabricWriter
from vhpc_slurm.fabric.managers import ManagerRequest, serve
from vhpc_slurm.fabric.opensm import Opensm

SOURCES = str(Path(__file__).parents[3] / "python")
OLD, NEW = b"# of the old vhpcd\n", b"# of the new vhpcd\n"

# Stops itself before the line with a number, counted over all lines of vhpc's code that ``replace`` runs.
FROZEN = """
import os, signal, sys
sys.path.insert(0, sys.argv[3])
from pathlib import Path
from vhpc_slurm.errors import FabricError
from vhpc_slurm.fabric.fence import FabricWriter
from vhpc_slurm.fabric.opensm import Opensm
file, stop_at, lines = Path(sys.argv[1]), int(sys.argv[2]), 0
def trace(frame, event, argument):
    global lines
    if "vhpc_slurm" not in frame.f_code.co_filename:
        return None
    if event == "line":
        lines += 1
        if lines == stop_at:
            os.kill(os.getpid(), signal.SIGSTOP)
    return trace
opensm = Opensm(file, file.with_name("pid"), file.with_name("log"), 1.0, FabricWriter(7))
sys.settrace(trace)
try:
    opensm.replace(b"# of the old vhpcd\\n")
    said = "wrote"
except FabricError as err:
    said = "refused"
sys.settrace(None)
print(said, lines)
"""


def opensm(file: Path, epoch: int) -> Opensm:
    return Opensm(file, file.with_name("pid"), file.with_name("log"), 1.0, FabricWriter(epoch))


def frozen(file: Path, line: int) -> tuple[subprocess.Popen[str], bool]:
    """An old vhpcd, and whether it has stopped at a line; else it has ended."""
    command = [sys.executable, "-c", FROZEN, str(file), str(line), SOURCES]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    return process, os.WIFSTOPPED(status)


def thaw(process: subprocess.Popen[str]) -> str:
    process.send_signal(signal.SIGCONT)
    said, _ = process.communicate(timeout=60)
    return said.split()[0]


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    found = tmp_path / "opensm" / "partitions.conf"
    found.parent.mkdir()
    found.write_bytes(b"# of neither\n")
    yield found
    left = sorted(path.name for path in found.parent.iterdir())
    assert left in (["partitions.conf"], [".partitions.conf.vhpcd-epoch-8", "partitions.conf"]), left


@pytest.mark.promise("fabric.fence")
@pytest.mark.long
def test_frozen_at_any_line_an_old_vhpcd_leaves_the_new_file(file: Path) -> None:
    line, outcomes = 0, set()
    while True:
        line += 1
        for path in file.parent.iterdir():
            path.unlink()
        file.write_bytes(b"# of neither\n")
        process, stopped = frozen(file, line)
        if not stopped:
            break
        opensm(file, 8).replace(NEW)
        outcomes.add(thaw(process))
        assert file.read_bytes() == NEW, f"frozen before line {line}"
        opensm(file, 8).replace(NEW)  # removes what the old one may have left
    assert line > 30, "so many lines are run"
    # At the last lines the old one had renamed its file before the new one came.
    assert outcomes == {"refused", "wrote"}
    opensm(file, 8).replace(NEW)


def test_a_lower_epoch_is_refused_and_the_same_one_continues(file: Path) -> None:
    opensm(file, 8).replace(NEW)
    with pytest.raises(FabricError, match="belongs to another vhpcd: it has epoch 8, this one has 7"):
        opensm(file, 7).replace(OLD)
    opensm(file, 8).replace(b"# again\n")
    assert file.read_bytes() == b"# again\n"


def test_a_restore_by_the_old_vhpcd_is_refused(file: Path) -> None:
    old = opensm(file, 7)
    old.replace(OLD)
    opensm(file, 8).replace(NEW)
    with pytest.raises(FabricError, match="belongs to another vhpcd"):
        old.put_back()
    assert file.read_bytes() == NEW


def test_the_only_vhpcd_makes_no_marks(file: Path) -> None:
    Opensm(file, file, file, 1.0, ALONE).replace(NEW)
    assert file.read_bytes() == NEW


def test_a_vhpcd_whose_time_is_over_writes_nothing(file: Path) -> None:
    late = FabricWriter(8, lambda: -0.1)
    with pytest.raises(FabricError, match="no longer the active one"):
        Opensm(file, file, file, 1.0, late).replace(NEW)
    assert file.read_bytes() == b"# of neither\n"


@pytest.mark.promise("fabric.fence")
def test_a_remote_host_refuses_a_lower_epoch_too(file: Path) -> None:
    data = partitions.render([partitions.DEFAULT], 1, "")
    here = Opensm(file, file.with_name("pid"), file.with_name("log"), 1.0)

    def asked(epoch: int) -> tuple[str, str, str] | None:
        line = msgspec.json.encode(ManagerRequest("replace", file=data, epoch=epoch))
        return serve(here, line).error

    assert asked(8) is None
    refused = asked(7)
    assert refused is not None
    assert "belongs to another vhpcd" in refused[0]


def test_a_folder_in_its_place_is_moved_away_and_a_file_never(file: Path) -> None:
    file.unlink()
    (file / "inside").mkdir(parents=True)
    opensm(file, 8).replace(NEW)
    assert file.read_bytes() == NEW
    (moved,) = file.parent.glob("partitions.conf.folder-*")
    (moved / "inside").rmdir()
    moved.rmdir()
    with pytest.raises(NotADirectoryError):
        os.rename(f"{file}/", moved)  # noqa: PTH104 - as the code under test does
