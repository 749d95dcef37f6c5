# SPDX-License-Identifier: Apache-2.0
"""Small file systems that tests fill: mounts of root."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PAGE = 4096
NO_SPACE = "No space left on device"


@contextmanager
def mounted(path: Path, pages: int = 64) -> Iterator[Path]:
    """A file system of so many pages, empty at first; afterwards the folder is what it was."""
    path.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={pages * PAGE}", "none", str(path)], check=True)
    try:
        yield path
    finally:
        # a log may still be open
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def fill(folder: Path, pages: int = 0) -> Path:
    """Leave so many pages of a file system free; returns the file that takes the others."""
    others = folder / "of-others"
    with others.open("wb", buffering=0) as file:
        with suppress(OSError):
            while True:
                file.write(bytes(PAGE))
        file.truncate(max(0, file.tell() - pages * PAGE))
    return others
