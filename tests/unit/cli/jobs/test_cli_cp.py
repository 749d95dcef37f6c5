# SPDX-License-Identifier: Apache-2.0
"""vhpc cp: files and folders both ways, by the real scripts; srun is a script that runs them on this host."""

from __future__ import annotations

import io
import os
import re
import signal
import socket
import stat
import tarfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from vhpc_slurm.slurm.steps import MARK

if TYPE_CHECKING:
    from guest_rig import Guest
    from step_rig import StepSite

pytest_plugins = ["guest_rig", "step_rig"]
MIB = 1 << 20


@pytest.fixture(autouse=True)
def _home(site: StepSite, monkeypatch: pytest.MonkeyPatch) -> None:
    """Home of the user in the guest; his folder on the login host is ``site.folder``."""
    monkeypatch.setenv("HOME", str(site.guest))


def tree(folder: Path) -> Path:
    (folder / "sub/empty").mkdir(parents=True)
    (folder / "sub").chmod(0o750)
    (folder / "sub/run.sh").write_text("#!/bin/sh\n")
    (folder / "sub/run.sh").chmod(0o755)
    (folder / "big").write_bytes(os.urandom(3 * MIB))
    (folder / ("long-" * 40)).write_text("a name beyond the old header")
    (folder / "link").symlink_to("sub/run.sh")
    (folder / "sub/up").symlink_to("../big")
    (folder / "other").hardlink_to(folder / "big")
    os.utime(folder / "big", (1e9, 1e9))
    return folder


def seen(folder: Path) -> dict[str, object]:
    """Content of a folder: kinds, modes, times of files, contents."""
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        name, status = str(path.relative_to(folder)), path.lstat()
        if path.is_symlink():
            found[name] = path.readlink()
        elif path.is_dir():
            found[name] = stat.S_IMODE(status.st_mode)
        else:
            found[name] = (stat.S_IMODE(status.st_mode), int(status.st_mtime), path.read_bytes())
    return found


@pytest.mark.promise("tools.cp")
def test_a_folder_goes_in_and_comes_back(site: StepSite) -> None:
    source = tree(site.folder / "data")
    assert site.run("cp", "data", "7:in") == (0, b"", "")
    assert seen(site.guest / "in") == seen(source)
    assert site.run("cp", "data", "7:in") == (0, b"", "")
    assert seen(site.guest / "in/data") == seen(source)
    assert site.run("cp", "7:in/data", "back") == (0, b"", "")
    assert seen(site.folder / "back") == seen(source)
    assert site.run("cp", f"7/n2:{site.guest}/in/data/.", "back") == (0, b"", "")
    assert not (site.folder / "back/data").exists()
    assert "--nodelist=n2" in site.asked()


def test_a_file_goes_in_and_comes_back(site: StepSite) -> None:
    data = os.urandom(2 * MIB + 1)
    (site.folder / "a file").write_bytes(data)
    (site.folder / "a file").chmod(0o640)
    os.utime(site.folder / "a file", (1e9, 1e9))
    (site.guest / "there").mkdir()
    for target in ("7:there", "7:there/x", "7:-x"):
        assert site.run("cp", "a file", target) == (0, b"", "")
    for path in ("there/a file", "there/x", "-x"):
        status = (site.guest / path).stat()
        assert (stat.S_IMODE(status.st_mode), status.st_mtime) == (0o640, 1e9)
        assert (site.guest / path).read_bytes() == data
    (site.guest / "there/x").chmod(0o4751)
    assert site.run("cp", "7:there/x", ".") == (0, b"", "")
    status = (site.folder / "x").stat()
    assert (stat.S_IMODE(status.st_mode), status.st_mtime) == (0o751, 1e9)
    assert (site.folder / "x").read_bytes() == data
    assert [p.name for p in (*site.folder.iterdir(), *site.guest.rglob("*")) if "vhpc-cp" in p.name] == []


def test_an_existing_file_is_replaced_as_a_whole(site: StepSite) -> None:
    (site.folder / "new").write_text("new")
    (site.guest / "old").write_text("the old file, which is longer")
    (site.guest / "to-old").symlink_to("old")
    assert site.run("cp", "new", "7:to-old")[0] == 0
    assert (site.guest / "old").read_text() == "new"
    assert (site.guest / "to-old").is_symlink()
    assert site.run("cp", "7:old", "/dev/null")[0] == 0
    assert Path("/dev/null").is_char_device()


def test_streams_are_read_and_written(site: StepSite) -> None:
    data = os.urandom(MIB)
    assert site.run("cp", "-", "7:log", stdin=data) == (0, b"", "")
    assert (site.guest / "log").read_bytes() == data
    assert site.run("cp", "7:log", "-") == (0, data, "")
    (site.guest / "folder").mkdir()
    (site.guest / "folder/x").write_text("y")
    with tarfile.open(fileobj=io.BytesIO(site.run("cp", "7:folder", "-")[1])) as archive:
        assert archive.getnames() == [".", "./x"]
    assert "it is a folder; give the name of a file" in site.run("cp", "-", "7:folder", stdin=b"x")[2]


def test_it_works_over_the_channel_of_a_guest(site: StepSite, guest: Guest) -> None:
    site.through(guest)
    source = tree(site.folder / "data")
    assert site.run("cp", "data", "7:in") == (0, b"", "")
    assert site.run("cp", "7:in", "back") == (0, b"", "")
    assert seen(site.folder / "back") == seen(source)


def test_text_of_a_task_prolog_is_no_part_of_a_copy(site: StepSite) -> None:
    site.before(f"printf 'said by\\n\\nf 644 1 1\\nthe {MARK}\\nsite\\n'")
    (site.guest / "y").write_text("x")
    assert site.run("cp", "7:y", "y") == (0, b"", "")
    assert (site.folder / "y").read_text() == "x"


def test_one_of_several_guests_gets_the_file(site: StepSite) -> None:
    (site.folder / "x").write_text("x")
    site.script("sh", "#!/bin/sh\n")
    assert site.run("cp", "x", "7:y", "--guest", "1") == (0, b"", "")
    assert (site.guest / "y").read_text() == "x"
    assert "--ntasks=3 --nodelist=n1 --input=1 --output=1 /bin/sh" in site.asked()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("a", "b"), "one of the two paths must be JOBID:PATH: neither is in a guest"),
        (("7:a", "7:b"), "one of the two paths must be JOBID:PATH: both are in guests"),
        (("missing", "7:b"), "cannot read missing: No such file or directory"),
        (("/dev/null", "7:b"), "cannot copy /dev/null: it is neither a file nor a folder"),
        (("7:missing", "b"), "the step in job 7 failed: missing: No such file or directory"),
        (("7:/dev/null", "b"), "/dev/null: neither a file nor a folder"),
        (("x", "7:missing/"), "missing/: No such folder"),
        (("x", "7:missing/y"), "failed: "),
        (("7:file", "missing/y"), "cannot write missing/y: No such file or directory"),
        (("7:folder", "x"), "cannot write x"),
        (("x", "7/n9:y"), "job 7 is not on node n9"),
    ],
)
def test_a_failed_copy_is_one_line(site: StepSite, words: tuple[str, str], expected: str) -> None:
    (site.folder / "x").write_text("x")
    (site.guest / "file").write_text("x")
    (site.guest / "folder").mkdir()
    code, out, said = site.run("cp", *words)
    assert (code, out, len(said.splitlines())) == (1, b"", 1), said
    assert expected in said
    assert (site.folder / "x").read_text() == "x"


def test_a_file_that_a_guest_cannot_take_is_named(site: StepSite) -> None:
    """By the name that the user gave, not by that of the temporary file; with the system's reason."""
    (site.folder / "x").write_text("x")
    for target in ("/proc", "/proc/x"):
        code, _, said = site.run("cp", "x", f"7:{target}")
        assert (code, len(said.splitlines())) == (1, 1)
        assert re.search(rf"the step in job 7 failed: {target}: [A-Z][a-z ]+$", said), said


def test_entries_left_out_are_counted_by_kind(site: StepSite) -> None:
    """Both ways; of a socket in a folder tarfile says nothing."""
    data = site.folder / "data"
    data.mkdir()
    for number in range(7):
        os.mkfifo(data / f"pipe{number}")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(data / "socket"))
    code, _, said = site.run("cp", "data", "7:in")
    assert (code, said) == (
        1,
        "vhpc: left out 7 pipes: pipe0, pipe1, pipe2, pipe3, pipe4 and 2 more; 1 socket: socket\n",
    )
    (site.guest / "in/up").symlink_to("/etc")
    code, _, said = site.run("cp", "7:in", "back")
    assert (code, said) == (1, "vhpc: left out 1 link that leads outside: ./up -> /etc\n")


def test_a_guest_without_tar_gets_single_files(site: StepSite) -> None:
    tools = site.folder / "bin"
    tools.mkdir()
    for name in ("sh", "cat", "chmod", "mv", "rm", "stat", "touch", "wc", "mkdir"):
        (tools / name).symlink_to(f"/bin/{name}")
    site.before(f"export PATH={tools}")
    (site.folder / "x").write_text("x")
    (site.folder / "folder").mkdir()
    assert site.run("cp", "x", "7:y") == (0, b"", "")
    assert site.run("cp", "7:y", "z") == (0, b"", "")
    for words in (("folder", "7:z"), ("7:.", "new")):
        assert "the image has no tar, which folders need; copy single files" in site.run("cp", *words)[2]


@pytest.mark.promise("tools.cp")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_copy_leaves_no_file(site: StepSite, number: signal.Signals) -> None:
    (site.folder / "x").write_bytes(bytes(64 * MIB))
    site.script("cat", "#!/bin/sh\nsleep 60\n")
    site.before(f"export PATH={site.folder}:$PATH")
    process = site.start("cp", "x", "7:y")
    site.step()
    time.sleep(0.5)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert not (site.guest / "y").exists()
    (site.folder / "cat").unlink()
    (site.guest / "y").write_bytes(bytes(64 * MIB))
    site.before("exec sh -c 'echo vhpc-begin; echo f 644 67108864 1; cat /dev/zero'")
    process = site.start("cp", "7:y", "back")
    time.sleep(1)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert not (site.folder / "back").exists()


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("head -c 100000 /dev/zero", "gave an unexpected answer"),
        ("echo 'f 644 5 1'; echo abc", "the copy is incomplete"),
        ("echo 'f 644 3 1'; cat /dev/zero", "the copy is incomplete"),
        ("echo 'f 644 99999999999999999 1'", "there is no space for what the guest has sent"),
        ("echo 'f 644 -1 1'", "gave an unexpected answer"),
        ("echo d; echo abc", "cannot extract what the guest has sent"),
    ],
)
def test_a_hostile_answer_leaves_nothing(site: StepSite, answer: str, expected: str) -> None:
    site.before(f"exec 2>/dev/null; echo {MARK}; sh -c '{answer.replace(chr(39), chr(34))}'; exit 0")
    code, _, said = site.run("cp", "7:x", "new")
    assert (code, len(said.splitlines())) == (1, 1), said
    assert expected in said
    assert not (site.folder / "new").is_file()
