"""The state file of a job on a node: what the SPANK plugin knows when a task starts.

``key=value`` lines, root's alone to write, replaced by rename so that a reader
sees one version or the next.  A user's mistake that was found while no task
ran yet waits here for the plugin to say it where the user looks.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from vhpc_slurm.errors import NodeError
from vhpc_slurm.model import Generation

LIMIT = 4000
VERSION = "1"


def write(path: Path, fields: dict[str, str]) -> None:
    """Replace the state file.

    Line breaks and other control characters in values become spaces: the
    reader is a small C parser and the text ends on a terminal.

    Raises:
        NodeError: it cannot be written.
    """
    lines = [f"version={VERSION}"]
    for key, value in fields.items():
        clean = "".join(c if c.isprintable() else " " for c in value)
        lines.append(f"{key}={clean.encode()[:LIMIT].decode(errors='ignore')}")
    part = path.with_name(".state.part")
    try:
        with contextlib.suppress(FileNotFoundError):
            part.unlink()
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        with os.fdopen(fd, "w", encoding="utf-8") as out:
            os.fchmod(fd, 0o644)
            out.write("\n".join(lines) + "\n")
        part.rename(path)
    except OSError as err:
        raise NodeError(f"cannot write {path}", str(err)) from err


def read(path: Path) -> dict[str, str]:
    """The fields of a state file; empty when there is none, U+FFFD for what is not UTF-8."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return {}
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)


def header(generation: Generation, image: str) -> dict[str, str]:
    """The fields that every version of the file carries."""
    return {
        "job": str(generation.job_id),
        "restart": str(generation.restart),
        "generation": str(generation),
        "image": image,
    }
