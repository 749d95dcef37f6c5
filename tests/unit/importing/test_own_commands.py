# SPDX-License-Identifier: Apache-2.0
"""Which files of an image a guest covers with the site's commands."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
from containers import entry, tar
from import_rig import applied

from vhpc_slurm.importing.owncommands import covered_label, own_commands, told

NAMES = ("srun", "squeue")


@pytest.mark.promise("image.commands")
@pytest.mark.parametrize(
    ("files", "path", "paths"),
    [
        ({"usr/bin/srun": "x", "usr/bin/other": "x"}, "", ["/usr/bin/srun"]),
        ({"usr/bin/srun": "x", "bin": "-> usr/bin"}, "", ["/usr/bin/srun"]),
        ({"usr/bin/srun": "x", "usr/local/bin/srun": "y"}, "", ["/usr/local/bin/srun", "/usr/bin/srun"]),
        ({"opt/slurm/bin/squeue": "x"}, "", []),
        ({"opt/slurm/bin/squeue": "x"}, "/opt/slurm/bin/:rel:/a/..", ["/opt/slurm/bin/squeue"]),
        ({"usr/bin/srun": "-> ../../opt/srun-24.11", "opt/srun-24.11": "x"}, "", ["/usr/bin/srun"]),
        ({"usr/bin/srun": "-> /run/vhpc/vhpc-agent"}, "", []),
        ({"usr/bin/srun": "-> /opt/multi", "opt/multi": "x"}, "", []),
        ({"usr/bin/srun": "-> srunner", "usr/bin/srunner": "x"}, "", []),
        ({"usr/bin/srun": "-> nowhere/srun", "usr/bin/squeue": "-> squeue"}, "", []),
        ({"usr/bin/srun/file": "x"}, "", []),
    ],
)
def test_own_commands_are_files_of_that_name(
    tmp_path: Path, files: dict[str, str], path: str, paths: list[str]
) -> None:
    """Files are name -> text, or ``-> TARGET`` for a link."""
    entries: list[tuple[tarfile.TarInfo | str, str]] = [
        (entry(name, tarfile.SYMTYPE, linkname=text[3:]), "") if text.startswith("-> ") else (name, text)
        for name, text in files.items()
    ]
    tree, _ = applied(tmp_path, tar(*entries))
    assert own_commands(tree, NAMES, path) == paths


def test_the_line_names_them_and_is_short() -> None:
    assert told([]) == ""
    assert covered_label({}) == {}
    line = told(["/usr/bin/srun", "/bin/squeue"])
    assert line == "in guests the site's commands cover those of the image: /usr/bin/srun, /bin/squeue"
    (value,) = covered_label({"own_commands": ["/x" * 400] * 3}).values()
    assert len(value) == 1024
