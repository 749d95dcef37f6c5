# SPDX-License-Identifier: Apache-2.0
"""AdminComment with the text of vhpc and that of another program."""

from __future__ import annotations

import pytest

from vhpc_slurm.slurm import comments

USAGE = "usage cpu_s=1.00 guests=1/1"


@pytest.mark.parametrize(
    ("present", "after"),
    [
        ("", "vhpc: new"),
        ("vhpc: image old@sha256:1", "vhpc: new"),
        (f"vhpc: image old@sha256:1; {USAGE}", "vhpc: new"),
        ('{"class": 7}', 'vhpc: new // {"class": 7}'),
        ("vhpc: image old@sha256:1 // a // b", "vhpc: new // a // b"),
        (f"vhpc: image old@sha256:1 // a; {USAGE}", "vhpc: new // a"),
        ("x" * 1011, "vhpc: new // " + "x" * 1011),
        ("x" * 1012, "vhpc: new"),
    ],
)
def test_text_of_another_program_stays_behind_ours(present: str, after: str) -> None:
    assert comments.beside("vhpc: new", present) == after
