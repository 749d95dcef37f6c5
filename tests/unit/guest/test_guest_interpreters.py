# SPDX-License-Identifier: Apache-2.0
"""Programs that cannot start in a guest: what their user reads, through the real programs."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from guest_rig import Guest

pytest_plugins = ["guest_rig"]


def test_a_missing_program_ends_with_2_as_with_slurmstepd(guest: Guest) -> None:
    done = guest.run("no-such-program")
    assert done.returncode == 2
    assert done.stderr == b"vhpc-run: execve(): no-such-program: No such file or directory\n"


def test_a_script_without_its_interpreter_is_reported(guest: Guest, tmp_path: Path) -> None:
    script = tmp_path / "x.sh"
    script.write_text("#!/no/such/shell\n")
    script.chmod(0o755)
    done = guest.run(str(script))
    assert done.returncode == 2
    assert done.stderr == (
        b"vhpc-run: execve(): bad interpreter(/no/such/shell): No such file or directory\n"
    )


def test_a_program_without_its_interpreter_is_told_which(guest: Guest, tmp_path: Path) -> None:
    """As in an image without /lib64, or of a program that came from another system."""
    true = shutil.which("true")
    assert true is not None
    content = Path(true).read_bytes()
    loader = b"/" + content.split(b"\0/", 1)[1].split(b"\0", 1)[0]
    missing = loader.replace(b"/ld-linux", b"/no-linux")
    program, script = tmp_path / "program", tmp_path / "script"
    program.write_bytes(content.replace(loader, missing, 1))
    script.write_text(f"#! {program} -e\n")
    for path in program, script:
        path.chmod(0o755)
    why = f": No such file or directory ({program} needs {missing.decode()}, which is missing)\n"
    done = guest.run(str(program))
    assert (done.returncode, done.stderr.decode()) == (2, f"vhpc-run: execve(): {program}{why}")
    done = guest.run("script", PATH=f"/no/such/folder:{tmp_path}:{os.environ['PATH']}")
    assert (done.returncode, done.stderr.decode()) == (
        2,
        f"vhpc-run: execve(): bad interpreter( {program} -e){why}",
    )
