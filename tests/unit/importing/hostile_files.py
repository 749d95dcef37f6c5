# SPDX-License-Identifier: Apache-2.0
"""Paths and folders that an import refuses, whatever they contain."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

from containers import tar
from hostile_rig import MAX_FILES, MAX_MIB, Case

GOOD = tar(("a", "b"))


def path(name: str, says: str, source: str, make: Callable[[Path], object] = lambda _path: None) -> Case:
    """A case that is one path; ``{}`` in the source is the folder, ``make`` gets the path ``x.tar`` in it."""

    def written(folder: Path) -> str:
        make(folder / "x.tar")
        return source.format(folder)

    return Case(name, says, written)


def folder(name: str, says: str, make: Callable[[Path], object]) -> Case:
    """A case that is a folder."""

    def written(top: Path) -> str:
        (top / "root").mkdir()
        make(top / "root")
        return f"dir:{top / 'root'}"

    return Case(f"folder: {name}", says, written)


def linked_pipe(at: Path) -> None:
    os.mkfifo(at.with_name("p"))
    at.symlink_to("p")


def bound(at: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(at))


def deep(top: Path) -> None:
    """Folders whose path is longer than a system call takes."""
    here = os.open(top, os.O_RDONLY)
    for _ in range(20):
        os.mkdir("d" * 250, dir_fd=here)
        below = os.open("d" * 250, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)


def many(top: Path) -> None:
    for number in range(MAX_FILES + 1):
        (top / str(number)).touch()


def large(top: Path) -> None:
    """Without blocks on the disk."""
    with (top / "x").open("wb") as file:
        file.truncate((MAX_MIB << 20) + 1)


def secret(top: Path) -> None:
    (top / "in").mkdir()
    (top / "in/secret").write_text("x")
    (top / "in/secret").chmod(0)


def locked(top: Path) -> None:
    (top / "in").mkdir(mode=0)


PATHS = [
    path("nothing", "x.tar does not exist", "{}/x.tar"),
    path("link to nothing", "x.tar does not exist", "{}/x.tar", lambda x: x.symlink_to("none")),
    path("path is a link to itself", "x.tar does not exist", "{}/x.tar", lambda x: x.symlink_to("x.tar")),
    path("pipe", "it is not a regular file", "{}/x.tar", os.mkfifo),
    path(
        "link to a pipe",
        "it is not a regular file",
        "{}/x.tar",
        linked_pipe,
    ),
    path("socket", "it is not a regular file", "{}/x.tar", bound),
    path("device", "it is not a regular file", "{}/x.tar", lambda x: x.symlink_to("/dev/zero")),
    path("folder as tar", "it is not a regular file", "tar:{}/x.tar", Path.mkdir),
    path("folder as archive", "it is not a regular file", "oci-archive:{}/x.tar", Path.mkdir),
    path("pipe as archive", "it is not a regular file", "docker-archive:{}/x.tar", os.mkfifo),
    path("file as folder", "it is not a folder", "dir:{}/x.tar", lambda x: x.write_bytes(GOOD)),
    path("file as layout", "it is not a folder", "oci:{}/x.tar", lambda x: x.write_bytes(GOOD)),
    path(
        "tar as docker's archive",
        "it has no file manifest.json",
        "docker-archive:{}/x.tar",
        lambda x: x.write_bytes(GOOD),
    ),
    path("path below a file", "does not exist", "tar:{}/x.tar/x.tar", Path.touch),
    path("unreadable file", "cannot read it: its mode", "{}/x.tar", lambda x: x.touch(mode=0)),
    path(
        "unreadable archive",
        "cannot read it: its mode",
        "oci-archive:{}/x.tar",
        lambda x: x.touch(mode=0),
    ),
]

FOLDERS = [
    folder("file without rights", "cannot read 'in/secret'", secret),
    folder("folder without rights", "cannot read the folder in: Permission denied", locked),
    folder("deeper than a path may be", "a path has more than 4096 bytes|File name too long", deep),
    folder("many files", f"more than {MAX_FILES} files", many),
    folder("large file without blocks", f"more than {MAX_MIB} MiB when unpacked", large),
]

CASES = [*PATHS, *FOLDERS]
