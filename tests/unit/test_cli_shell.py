# SPDX-License-Identifier: Apache-2.0
"""vhpc shell: what it asks srun for, and when it imports first."""

from __future__ import annotations

from pathlib import Path

import pytest

from vhpc_slurm.cli.images import imports as imageimport
from vhpc_slurm.cli.jobs import shell
from vhpc_slurm.cli.main import main
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


def asked(what: str, *options: str, config: Config | None = None) -> list[str]:
    with pytest.raises(ReplacedError) as caught:
        shell.run(config or Config(), what, options)
    argv: list[str] = caught.value.args[0]
    return argv


def test_an_image_is_given_to_srun() -> None:
    argv = asked("own/mine:v2", "-c", "4", "--vhpc-network=nat")
    assert argv[:6] == ["srun", "--pty", "--vhpc-image=own/mine:v2", "-c", "4", "--vhpc-network=nat"]
    assert argv[6:8] == ["/bin/sh", "-c"]


@pytest.mark.parametrize("command", [("shell",), ("image", "run")])
def test_both_commands_pass_further_options_to_srun(
    command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VHPC_DEBUG", raising=False)
    seen: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(shell, "run", lambda _config, image, words: seen.append((image, list(words))))
    assert main([*command, "own/mine", "-c", "4", "--vhpc-network=nat"]) == 0
    assert seen == [("own/mine", ["-c", "4", "--vhpc-network=nat"])]


def test_a_container_is_imported_first(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    image = f"own/debian:latest@sha256:{'12' * 32}"

    def image_of(_images: Images, source: Source, catalog: Path, _progress: object) -> str:
        seen.extend((str(source), str(catalog)))
        return image

    monkeypatch.setattr(imageimport, "image_of", image_of)
    config = Config(images=Images(user_catalog="/scratch/{user}/images"))
    argv = asked("docker://debian:13", config=config)
    assert seen == ["docker://debian:13", "/scratch/root/images"]
    assert argv[2] == f"--vhpc-image={image}"
    with pytest.raises(UserError, match="images of users' own are not used"):
        shell.run(Config(), "docker://debian:13", ())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("docker://x", True), ("oci:/a", True), ("docker-archive:./a.tar:x", True), ("dir:/a", True),
        ("debian-minimal", False), ("oci:latest", False), ("own/oci:v1", False), ("tar:v1", False),
    ],
)  # fmt: skip
def test_images_and_sources_are_told_apart(text: str, *, expected: bool) -> None:
    assert is_source(text) is expected


def test_without_srun_there_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    config = Config(controller=Controller(slurm_bin=str(tmp_path)))
    with pytest.raises(SlurmError, match=r"cannot start .*/srun: No such file"):
        shell.run(config, "x", ())
