# SPDX-License-Identifier: Apache-2.0
"""The directory for temporary files that a program finds in a guest."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from guest_rig import Guest

pytest_plugins = ["guest_rig"]


def test_a_directory_for_temporary_files_is_made(guest: Guest, tmp_path: Path) -> None:
    """As slurmstepd makes it on the node for each task."""
    wanted = tmp_path / "own"
    done = guest.run("sh", "-c", "stat -c '%a %F' $TMPDIR; mktemp", TMPDIR=str(wanted))
    mode, name = done.stdout.decode().splitlines()
    assert (mode, Path(name).parent, done.stderr) == ("700 directory", wanted, b"")


@pytest.mark.parametrize(
    ("path", "why"), [("no/such/folder", "No such file or directory"), ("file", "Not a directory")]
)
def test_programs_get_another_directory_for_temporary_files(
    guest: Guest, tmp_path: Path, path: str, why: str
) -> None:
    (tmp_path / "file").touch()
    done = guest.run("sh", "-c", "echo $TMPDIR", TMPDIR=f"{tmp_path}/{path}")
    assert done.stdout == b"/tmp\n"
    assert done.stderr.decode().splitlines() == [
        f"vhpc-agent: error: TMPDIR [{tmp_path}/{path}] cannot be used: {why}",
        "vhpc-agent: error: Setting TMPDIR to /tmp",
    ]
