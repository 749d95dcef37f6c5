# SPDX-License-Identifier: Apache-2.0
"""Environment files: vhpc environment prints the options of a file, or the line that is wrong."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from vhpc_command import Vhpc

from vhpc_slurm.cli.host import plan
from vhpc_slurm.errors import UserError
from vhpc_slurm.options import OPTIONS, ValueRefusedError, parse_environment

LAB = """
# of our group
image = "debian-hpc:2"
guests-per-node = 2
disk = "20G:/local"
network = ["job", "nat"]
mount = [
    "/project/lab/data:/data:ro",
    "/project/lab/tools:/opt/lab",
]
[env]
OMP_PLACES = "cores"
TITLE = "a b=c"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """An environment file."""
    path = tmp_path / "lab.toml"
    path.write_text(LAB)
    return path


def test_options_are_printed_as_a_user_writes_them(vhpc: Vhpc, file: Path) -> None:
    assert vhpc("environment", str(file)).splitlines() == [
        "--vhpc-image=debian-hpc:2",
        "--vhpc-guests-per-node=2",
        "--vhpc-network=job,nat",
        "--vhpc-disk=20G:/local",
        "--vhpc-mount=/project/lab/data:/data:ro,/project/lab/tools:/opt/lab",
        "--vhpc-env=OMP_PLACES=cores,TITLE=a b=c",
    ]
    assert json.loads(vhpc("environment", "--json", str(file)))["guests-per-node"] == "2"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('imgae = "a"', "line 1: there is no option 'imgae' (did you mean image?)"),
        ('\n\nenvironment = "b"', "line 3: there is no option 'environment' (options are image,"),
        ("image = 3", "line 1: image: a string is expected"),
        ("vfs = true", "line 1: vfs: a string or a whole number is expected"),
        ("#\nguests-per-node = 65", "line 2: guests-per-node=65: a whole number from 1 to 64 is expected"),
        ("[env]\nA = 1", "line 1: env: a table of strings is expected"),
        ('env.A = "1,2"', "line 1: env: a value has a comma, which the option has between values"),
        ("mount = [1]", "line 1: mount: an array of strings is expected"),
        ("mount = []", "line 1: mount=: SRC:DST or SRC:DST:ro is expected"),
        ('image = "a', "it is not TOML: "),
        ('image = "A B"', "is not an image name"),
        (b"\xff", "it is not UTF-8"),
        (b"#" * 65537, "it is larger than 64 KiB"),
        (None, "cannot read {file}: No such file or directory"),
    ],
)
def test_a_wrong_file_is_one_line(vhpc: Vhpc, tmp_path: Path, text: str | bytes | None, says: str) -> None:
    path = tmp_path / "a.toml"
    if text is not None:
        path.write_bytes(text.encode() if isinstance(text, str) else text)
    assert vhpc("environment", str(path), code=1) == ""
    assert says.format(file=path) in vhpc.error


def test_each_option_of_a_job_that_boots_may_be_a_key() -> None:
    example = {
        "mem-reserve": '"2G"', "batch": '"host"', "timeout": "60", "console": '"c.txt"', "vfs": "2",
        "disk": "100", "shares": '"home"', "workdir": '"/opt"', "save": '"own/a"', "image": '"a"',
        "guests-per-node": "1", "network": '"none"', "mount": '"/a/b:/c"', "env": '"A=1"',
        "checkpoint": '"limit,every:5m"', "cluster": '"dask:keep"',
    }  # fmt: skip
    text = "\n".join(f"{name} = {value}" for name, value in example.items())
    found = parse_environment(text)
    assert {option.name for option, _ in found} == {option.name for option in OPTIONS} - {
        "environment",
        "resume",
    }
    assert {option.name: value for option, value in found} == {
        name: str(tomllib.loads(f"a = {value}")["a"]) for name, value in example.items()
    }


def test_a_key_that_is_quoted_has_a_line() -> None:
    with pytest.raises(ValueRefusedError, match="line 2: image"):
        parse_environment('#\n"image" = 1')


def test_a_plan_has_the_values_that_its_command_does_not_name(file: Path) -> None:
    image, values = plan.with_file(None, {"environment": str(file), "network": "none"})
    assert image == "debian-hpc:2"
    assert values["network"] == "none"
    assert (values["disk_mib"], values["disk_mount"], values["guests_per_node"]) == (20480, "/local", 2)
    assert values["from_file"] == ("image", "guests-per-node", "disk", "mount", "env")
    assert plan.with_file("other", {"environment": str(file)})[0] == "other"


def test_a_plan_refuses_a_wrong_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        plan.with_file(None, {"environment": str(tmp_path / "none")})
