# SPDX-License-Identifier: Apache-2.0
"""The output of a program in a guest goes to a file that has no room for it."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from guest_processes import WAIT_S
from small_fs import NO_SPACE, fill, mounted
from stepd import needs_root

if TYPE_CHECKING:
    from guest_rig import Guest

pytest_plugins = ["guest_rig"]
pytestmark = needs_root
WINDOW = 1 << 20
"""So much may be on its way; a program that writes more has been told that there was place for it."""


@pytest.mark.promise("user.full-home")
def test_a_program_continues_if_its_output_has_no_space(guest: Guest, tmp_path: Path) -> None:
    """As one on a node that does not look at the result of write(2); one line says what is missing."""
    written = 3 * WINDOW
    script = f"head -c {written} /dev/zero; echo told >&2; exit 3"
    with mounted(tmp_path / "home") as home:
        fill(home)
        with (home / "out").open("wb") as out:
            done = subprocess.run(
                [f"{guest.bin}/vhpc-run", "sh", "-c", script],
                env=guest.env(SLURM_JOB_ID="5"),
                stdout=out,
                stderr=subprocess.PIPE,
                timeout=WAIT_S,
                check=False,
            )
        assert (home / "out").stat().st_size == 0
    assert done.returncode == 3
    told, line = done.stderr.decode().splitlines()
    assert told == "told"
    assert line.startswith("vhpc: step 5.")
    assert f": {written} bytes of its output are missing: {NO_SPACE}; " in line
