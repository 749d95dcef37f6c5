# SPDX-License-Identifier: Apache-2.0
"""vhpc shell: what it asks srun for, and when it imports first."""

from __future__ import annotations

from pathlib import Path

import pytest

from vhpc_slurm.cli import options
from vhpc_slurm.cli.images import imports
from vhpc_slurm.cli.main import COMMAND
from vhpc_slurm.config import Config
from vhpc_slurm.config.controller import Controller
from vhpc_slurm.config.images import Images
from vhpc_slurm.errors import UserError
from vhpc_slurm.importing.source import Source, is_source
from vhpc_slurm.slurm.port import SlurmError


class ReplacedError(Exception):
    """Stands for the program that replaces this process; has its arguments."""


@pytest.fixture(autouse=True)
def _srun(monkeypatch: pytest.MonkeyPatch) -> None:
    def replace(file: Path, argv: list[str], environment: dict[str, str]) -> None:
        assert file == Path("/usr/bin/srun")
        assert "SLURM_JOB_ID" not in environment
        raise ReplacedError(argv)

    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr("os.execve", replace)
    monkeypatch.setattr(options, "config", Config)


def asked(*words: str) -> list[str]:
    with pytest.raises(ReplacedError) as caught:
        COMMAND.main(args=list(words), standalone_mode=False)
    argv: list[str] = caught.value.args[0]
    return argv


@pytest.mark.parametrize("command", [("shell",), ("image", "run")])
def test_an_image_and_further_options_are_given_to_srun(command: tuple[str, ...]) -> None:
    argv = asked(*command, "own/mine:v2", "-c", "4", "--vhpc-network=nat")
    assert argv[:6] == ["srun", "--pty", "--vhpc-image=own/mine:v2", "-c", "4", "--vhpc-network=nat"]
    assert argv[6:8] == ["/bin/sh", "-c"]


def test_a_container_is_imported_first(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    image = f"own/debian:latest@sha256:{'12' * 32}"

    def image_of(_images: Images, source: Source, catalog: Path, _progress: object, _names: object) -> str:
        seen.extend((str(source), str(catalog)))
        return image

    monkeypatch.setattr(imports, "image_of", image_of)
    config = Config(images=Images(user_catalog="/scratch/{user}/images"))
    monkeypatch.setattr(options, "config", lambda: config)
    argv = asked("shell", "docker://debian:13")
    assert seen == ["docker://debian:13", "/scratch/root/images"]
    assert argv[2] == f"--vhpc-image={image}"
    monkeypatch.setattr(options, "config", Config)
    with pytest.raises(UserError, match="images of users' own are not used"):
        COMMAND.main(args=["shell", "docker://debian:13"], standalone_mode=False)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("docker://x", True), ("oci:/a", True), ("docker-archive:./a.tar:x", True), ("dir:/a", True),
        ("debian-minimal", False), ("oci:latest", False), ("own/oci:v1", False), ("tar:v1", False),
    ],
)  # fmt: skip
def test_images_and_sources_are_distinguished(text: str, *, expected: bool) -> None:
    assert is_source(text) is expected


def test_without_srun_there_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    config = Config(controller=Controller(slurm_bin=str(tmp_path)))
    monkeypatch.setattr(options, "config", lambda: config)
    with pytest.raises(SlurmError, match=r"cannot start .*/srun: No such file"):
        COMMAND.main(args=["shell", "x"], standalone_mode=False)
