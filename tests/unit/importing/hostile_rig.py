# SPDX-License-Identifier: Apache-2.0
"""Imports of sources that must be refused, and what must hold after each."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from containers import tar
from site_catalog import publish

from vhpc_slurm.config.images import Images
from vhpc_slurm.errors import UserError
from vhpc_slurm.importing.imports import import_image
from vhpc_slurm.importing.source import Source
from vhpc_slurm.model import ImageRef

MAX_MIB, MAX_FILES, TIMEOUT_S = 16, 300, 60
"""Limits of these imports: what would fill a disk does not fill it in a test."""
LINE_MAX = 700


@dataclass(frozen=True)
class Case:
    """A source that is refused.

    Attributes:
        name: of the case.
        says: the essential words of the error, as a regular expression.
        make: writes the source into an empty folder and returns it as a user writes it.
    """

    name: str
    says: str
    make: Callable[[Path], str]


def of_bytes(name: str, says: str, data: Callable[[], bytes], file: str = "x.tar") -> Case:
    """A case that is one file."""

    def make(folder: Path) -> str:
        (folder / file).write_bytes(data())
        return str(folder / file)

    return Case(name, says, make)


def of_entries(name: str, says: str, *entries: object) -> Case:
    """A case that is a tar of these entries."""
    return of_bytes(name, says, lambda: tar(*entries))  # type: ignore[arg-type]


class Site:
    """A site's catalogue with a kernel, a user's catalogue with an image, and a secret outside of both."""

    def __init__(self, top: Path) -> None:
        self.top, self.own, self.source, self.work = top, top / "own", top / "source", top / "work"
        publish(top / "site", "base", b"root")
        publish(self.own, "before", b"an image that is there already")
        for folder in (self.source, self.work, self.own / "names", top / "outside"):
            folder.mkdir(exist_ok=True)
        (top / "outside/secret").write_text("secret")
        self.images = Images(
            catalog=str(top / "site"),
            import_kernel="base",
            import_max_mib=MAX_MIB,
            import_max_files=MAX_FILES,
            import_timeout_s=TIMEOUT_S,
        )

    def refusal(self, source: str) -> str:
        """The line that an import fails with; fails if anything is left of it."""
        before = self._files()
        with pytest.raises(UserError) as caught:
            import_image(self.images, Source.parse(source), ImageRef("new"), self.own, "", lambda _line: None)
        assert self._files() == before, "a file was written, changed or left"
        assert list(self.processes()) == [], "a process is left"
        line = caught.value.line()
        assert len(line) < LINE_MAX
        return line

    def _files(self) -> dict[str, tuple[int, ...]]:
        """All files but those of the source; what Python makes for temporary use is below ``work``."""
        found: dict[str, tuple[int, ...]] = {}
        for path in (path for top in self.top.iterdir() if top != self.source for path in top.rglob("*")):
            about = path.lstat()
            if path.name != ".lock":
                size = 0 if path.is_dir() else about.st_size
                found[str(path)] = (about.st_mode, about.st_ino, size)
        return found

    def processes(self) -> Iterator[int]:
        """Processes other than this one that have a part of the site in their file system or command."""
        mark = str(self.top).encode()
        for path in Path("/proc").glob("[0-9]*"):
            try:
                known = (path / "mountinfo").read_bytes() + (path / "cmdline").read_bytes()
                state = (path / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if mark in known and state != "Z" and int(path.name) != os.getpid():
                yield int(path.name)
