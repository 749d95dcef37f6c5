# SPDX-License-Identifier: Apache-2.0
"""vhpc cp: files and folders into a guest and out of it, through a step of the job."""

from __future__ import annotations

import contextlib
import io
import os
import re
import stat
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Annotated, Any

import typer

from vhpc_slurm import slurm
from vhpc_slurm.cli import options, output
from vhpc_slurm.cli.jobs import jobguest
from vhpc_slurm.cli.jobs.extract import Copied, Kind, extract, need_space
from vhpc_slurm.cli.jobs.jobguest import ONLY_TASK, GuestOfNode, JobGuest
from vhpc_slurm.errors import UserError, VhpcError
from vhpc_slurm.slurm.steps import MARK, Step

STREAM = "-"
CHUNK = 1 << 18
START_S = 120.0
"""How long a step may take to start."""
END_S = 300.0
"""How long a step may take to write its last bytes."""
REPORT_S = 0.5
LINE_MAX = 80
_REMOTE = re.compile(r"([1-9][0-9]{0,9})(?:/([A-Za-z0-9._-]{1,255}))?:(.*)", re.DOTALL)
_FILE = re.compile(rb"f ([0-7]{1,4}) ([0-9]{1,18}) (-?[0-9]{1,11})")

# The scripts in the guest need sh, coreutils or busybox, and tar for folders. The first argument is the
# task that runs (ONLY_TASK), then come those of the script.
_BEGIN = (
    ONLY_TASK
    + """
set -u
die() { echo "$1" >&2; exit 1; }
cd ~ 2>/dev/null || cd /
case $1 in /*) at=$1 ;; *) at=./$1 ;; esac
"""
)
_WITH_TAR = 'command -v tar >/dev/null || die "the image has no tar, which folders need; copy single files"\n'

SEND = f"""{_BEGIN}echo {MARK}
if [ -d "$at" ]; then
    {_WITH_TAR}
    [ -x "$at" ] && [ -r "$at" ] || die "$1: Permission denied"
    echo d && exec tar -c -f - -C "$at" .
elif [ -f "$at" ]; then
    [ -r "$at" ] || die "$1: Permission denied"
    stat -L -c 'f %a %s %Y' "$at" && exec cat "$at"
elif [ -e "$at" ]; then die "$1: neither a file nor a folder"
else die "$1: No such file or directory"
fi
"""
"""Argument: a path.  Writes MARK, then ``d`` and a tar, or ``f MODE SIZE TIME`` and the content."""

_PLACE = """
if [ -d "$at" ]; then
    [ -n "$2" ] || die "$1: it is a folder; give the name of a file"
    at=${at%/}/$2
    [ ! -d "$at" ] || die "$at: it is a folder"
fi
case $at in */) die "$1: No such folder" ;; esac
[ -d "${at%/*}/" ] || die "$1: No such folder"
"""
RECEIVE_FILE = f"""{_BEGIN}{_PLACE}
[ ! -L "$at" ] || at=$(readlink -f "$at") || die "$1: a link that leads nowhere"
if [ -e "$at" ] && [ ! -f "$at" ]; then exec cat > "$at"; fi
part=$at.vhpc-cp.$$
# Messages of the system have the temporary name; their last part is the reason.
name=$1
try() {{ said=$("$@" 2>&1) || die "$name: ${{said##*: }}"; }}
write() {{ umask 077; cat > "$part"; }}
trap 'rm -f "$part"' EXIT
trap 'exit 1' HUP INT TERM
try write
[ -z "$3" ] || [ "$(($(wc -c < "$part")))" = "$3" ] || die "$1: the copy is incomplete"
if [ -n "$4" ]; then try chmod "$4" "$part"; try touch -d "@$5" "$part"
else try chmod "$(printf %o $((0666 & ~0$(umask))))" "$part"
fi
try mv -f "$part" "$at"
"""
"""Arguments: a path, the name in it if it is a folder, and size, mode and time (all empty: not known)."""

RECEIVE_FOLDER = f"""{_BEGIN}{_WITH_TAR}
if [ -d "$at" ]; then
    [ -z "$2" ] || at=${{at%/}}/$2
fi
[ -d "$at" ] || mkdir -m "$3" "$at" || exit 1
exec tar -x -p -o -f - -C "$at"
"""
"""Arguments: a path, the name in it if it is a folder (empty: into the folder itself), mode of a new one."""


@dataclass(frozen=True)
class Remote:
    """``JOBID:PATH`` or ``JOBID/NODE:PATH``."""

    job_id: int
    node: str | None
    path: str


def parse(text: str) -> Remote | None:
    """A path in a guest; None for one of this host."""
    match = _REMOTE.fullmatch(text)
    return Remote(int(match[1]), match[2], match[3] or ".") if match else None


def cp(
    source: Annotated[str, typer.Argument(metavar="SRC", show_default=False)],
    target: Annotated[
        str,
        typer.Argument(metavar="DST", help="One of the two is JOBID[/NODE]:PATH.", show_default=False),
    ],
    guest: GuestOfNode = 0,
) -> int:
    """Copy a file or a folder into a guest of your running job, or out of it.

    A path in a guest is JOBID:PATH, or JOBID/NODE:PATH; without a slash it begins in your home.  As with
    cp -r, DST may be a folder.  Modes and times are kept.  - is standard input or output.
    """
    config = options.config()
    here, there = parse(source), parse(target)
    if (here is None) == (there is None):
        raise UserError(
            "one of the two paths must be JOBID:PATH",
            "both are in guests" if here else "neither is in a guest",
            "see: man vhpc; a file here whose name looks like JOBID:PATH is ./NAME",
        )
    remote = here or there
    assert remote is not None
    if here is None and source != STREAM:
        _check_source(Path(source))
    place = jobguest.find(slurm.user_jobs(config), remote.job_id, remote.node, guest)
    with _meter() as count:
        if here is None:
            return _Sending(place, remote.path, count).send(source)
        return _receive(place, remote.path, target, count)


def _check_source(path: Path) -> None:
    try:
        mode = path.stat().st_mode
    except OSError as err:
        raise UserError(f"cannot read {path}", err.strerror or str(err)) from err
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise UserError(f"cannot copy {path}", "it is neither a file nor a folder")


@contextlib.contextmanager
def _meter() -> Iterator[Callable[[int], None]]:
    """A function that gets numbers of bytes; on a terminal their sum is shown."""
    total, said, shown = 0, time.monotonic(), False

    def count(size: int) -> None:
        nonlocal total, said, shown
        total += size
        if sys.stderr.isatty() and time.monotonic() - said >= REPORT_S:
            said, shown = time.monotonic(), True
            print(f"\rvhpc: {output.size(total)} ", end="", file=sys.stderr, flush=True)

    try:
        yield count
    finally:
        if shown:
            print(f"\rvhpc: {output.size(total)} ", file=sys.stderr)


class _Counted(io.RawIOBase):
    """A stream whose bytes are counted."""

    def __init__(self, raw: IO[bytes], count: Callable[[int], None]) -> None:
        self._raw, self._count = raw, count

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._raw.read(len(buffer)) or b""
        buffer[: len(data)] = data
        self._count(len(data))
        return len(data)

    def write(self, data: Any) -> int:
        view = memoryview(data)
        while view:
            written = self._raw.write(view) or 0
            self._count(written)
            view = view[written:]
        return len(data)


class _Archive(tarfile.TarFile):
    """A tar to write; tarfile itself says nothing of files that it has no form for, which are sockets."""

    skipped: Callable[[str], None]

    def gettarinfo(self, name: Any = None, arcname: Any = None, fileobj: Any = None) -> Any:
        found = super().gettarinfo(name, arcname, fileobj)
        if found is None:
            self.skipped(str(arcname or name))
        return found


@contextlib.contextmanager
def _shell(place: JobGuest, script: str, *arguments: str) -> Iterator[Step]:
    """A step that runs a script; it is ended at once if the block fails."""
    step = place.start("vhpc-cp", ["/bin/sh", "-c", script, "vhpc-cp", str(place.task), *arguments])
    failed = True
    try:
        yield step
        failed = False
    finally:
        step.end(at_once=failed)


def _last_name(path: str) -> str:
    """The name of a copy in a folder; empty: the content of a folder is copied."""
    name = PurePosixPath(path).name
    return "" if name == ".." or path.endswith("/.") else name


def _finish(place: JobGuest, step: Step) -> None:
    """Wait for the end of a step; the error of one that has failed."""
    code = step.wait(END_S)
    if code != 0:
        raise place.failure(step, code) if code is not None else UserError("the step does not end")


@dataclass(frozen=True)
class _Sending:
    """Copies into a guest."""

    place: JobGuest
    path: str
    count: Callable[[int], None]

    def send(self, source: str) -> int:
        if source == STREAM:
            return self._file(sys.stdin.buffer, "", "", "", "")
        path = Path(source)
        if path.is_dir():
            return self._folder(path, _last_name(source))
        try:
            with path.open("rb") as file:
                found = os.fstat(file.fileno())
                mode, mtime = f"{found.st_mode & 0o777:o}", str(int(found.st_mtime))
                return self._file(file, path.name, str(found.st_size), mode, mtime)
        except OSError as err:
            raise UserError(f"cannot read {path}", err.strerror or str(err)) from err

    def _file(self, file: IO[bytes], *described: str) -> int:
        with _shell(self.place, RECEIVE_FILE, self.path, *described) as step:
            target = _Counted(step.stdin, self.count)
            with contextlib.suppress(BrokenPipeError):  # the step says why
                while chunk := file.read(CHUNK):
                    target.write(chunk)
            step.stdin.close()
            _finish(self.place, step)
        return 0

    def _folder(self, folder: Path, name: str) -> int:
        result = Copied()

        def kept(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
            if entry.isreg() or entry.isdir() or entry.issym() or entry.islnk():
                entry.mode &= 0o777
                return entry
            result.leave_out_entry(entry)
            return None

        def skipped(name: str) -> None:
            result.leave_out(Kind.SOCKET, name)

        mode = f"{folder.stat().st_mode & 0o777:o}"
        with _shell(self.place, RECEIVE_FOLDER, self.path, name, mode) as step:
            target: Any = _Counted(step.stdin, self.count)
            try:
                # not the folder itself: tar would change mode and time of an existing one
                with _Archive.open(fileobj=target, mode="w|", format=tarfile.GNU_FORMAT) as archive:
                    archive.skipped = skipped
                    for child in sorted(folder.iterdir()):
                        archive.add(child, child.name, filter=kept)
                step.stdin.close()
            except BrokenPipeError:
                pass  # the step says why
            except OSError as err:
                raise UserError(f"cannot read {folder}", str(err)) from err
            _finish(self.place, step)
        return _report(result)


def _report(result: Copied) -> int:
    """Say what was left out."""
    line = result.left_out_line()
    if line:
        print(f"vhpc: {line}", file=sys.stderr)
    return int(bool(line))


def _receive(place: JobGuest, path: str, target: str, count: Callable[[int], None]) -> int:
    """Copy out of a guest."""
    with _shell(place, SEND, path) as step:
        head = step.read_line(LINE_MAX, START_S) if step.begins(START_S) else b""
        match = _FILE.fullmatch(head or b"")
        if head != b"d" and not match:
            if head == b"":
                _finish(place, step)
            raise UserError(f"{place} gave an unexpected answer")
        stream = io.BufferedReader(_Counted(step.stdout, count), CHUNK)
        if target == STREAM:
            while data := stream.read(CHUNK):
                sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
            _finish(place, step)
            return 0
        with _writable(Path(target)):
            name = _last_name(path)
            if match is None:
                return _take_folder(place, step, stream, Path(target), name)
            numbers = (int(match[1], 8), int(match[2]), int(match[3]))
            return _take_file(place, step, stream, Path(target), name, numbers)


@contextlib.contextmanager
def _writable(target: Path) -> Iterator[None]:
    try:
        yield
    except VhpcError:
        raise
    except OSError as err:
        raise UserError(f"cannot write {target}", err.strerror or str(err)) from err


def _take_folder(place: JobGuest, step: Step, stream: IO[bytes], target: Path, name: str) -> int:
    if target.is_dir() and name:
        target /= name
    is_new = not target.is_dir()
    if is_new:
        target.mkdir(0o700)
    folder = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        result = extract(stream, folder, is_new=is_new)
    finally:
        os.close(folder)
    _finish(place, step)
    return _report(result)


def _take_file(
    place: JobGuest, step: Step, stream: IO[bytes], target: Path, name: str, numbers: tuple[int, int, int]
) -> int:
    """Write a file under another name, and rename it when it is complete."""
    mode, size, mtime = numbers
    if target.is_dir():
        target /= name
    target = target.resolve()
    if target.exists() and not target.is_file():  # /dev/null
        with target.open("wb") as file:
            _copy(stream, file, size)
        _finish(place, step)
        return 0
    descriptor, temporary = tempfile.mkstemp(prefix=f".{target.name[:200]}.", dir=target.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            need_space(descriptor, size)
            _copy(stream, file, size)
            file.flush()
            _finish(place, step)
            os.fchmod(descriptor, mode & 0o777)
            os.utime(descriptor, (mtime, mtime))
        Path(temporary).replace(target)
    except BaseException:
        Path(temporary).unlink()
        raise
    return 0


def _copy(source: IO[bytes], target: IO[bytes], size: int) -> None:
    """Copy exactly so many bytes."""
    left = size
    while data := source.read(min(CHUNK, left + 1)):
        left -= len(data)
        if left < 0:
            break
        target.write(data)
    if left:
        raise UserError("the copy is incomplete", "the file was changed, or the step has ended", "try again")
