# SPDX-License-Identifier: Apache-2.0
"""`vhpc doctor` on plugstack.conf, which loads the plugin."""

from __future__ import annotations

from pathlib import Path

import pytest

from vhpc_slurm.cli.host.checks import CheckResult, Level, plugstack
from vhpc_slurm.config import Config, Paths
from vhpc_slurm.slurm.settings import SlurmSettings


def plugstack_of(
    tmp_path: Path, text: str, *, installed: bool = True, submits: bool = True, paths: Paths | None = None
) -> CheckResult:
    (tmp_path / "plugstack.conf").write_text(text)
    folder = tmp_path / "plugins"
    folder.mkdir()
    if installed:
        (folder / "vhpc.so").write_bytes(b"")
    return plugstack.check(
        SlurmSettings.parse(f"SLURM_CONF = {tmp_path}/slurm.conf\nPluginDir = /absent:{folder}\n"),
        Config(paths=paths or Paths()),
        submits=submits,
        is_node=paths is not None,
    )


def test_a_required_plugin_that_exists_is_ok(tmp_path: Path) -> None:
    assert plugstack_of(tmp_path, "# ours\nrequired vhpc.so default_image=x\n").level is Level.OK


def test_a_plugin_is_found_through_includes(tmp_path: Path) -> None:
    (tmp_path / "plugstack.conf.d").mkdir()
    (tmp_path / "plugstack.conf.d" / "vhpc.conf").write_text("required vhpc.so\n")
    assert plugstack_of(tmp_path, f"include {tmp_path}/plugstack.conf.d/*.conf\n").level is Level.OK


def test_plugstack_is_read_from_the_folder_of_slurm_conf(tmp_path: Path) -> None:
    own = tmp_path / "opt/plugstack.conf"
    own.parent.mkdir()
    own.write_text("required vhpc.so\n")
    (tmp_path / "vhpc.so").write_bytes(b"")
    text = "SLURM_CONF = /etc/slurm/slurm.conf\nPlugStackConfig = {}\nPluginDir = {}\n"
    default = SlurmSettings.parse(text.format("/etc/slurm/plugstack.conf", tmp_path))
    assert plugstack.check(default, Config(), f"{own.parent}/slurm.conf").level is Level.OK
    elsewhere = SlurmSettings.parse(text.format(f"{tmp_path}/other.conf", tmp_path))
    assert plugstack.check(elsewhere, Config(), f"{own.parent}/slurm.conf").level is Level.ERROR


def test_a_plugstack_that_includes_itself_ends(tmp_path: Path) -> None:
    assert plugstack_of(tmp_path, "include plugstack.conf\n").level is Level.ERROR


def test_a_missing_plugin_is_an_error_unless_optional(tmp_path: Path) -> None:
    for name, text, installed, level in (
        ("a", "optional vhpc.so\n", True, Level.WARN),
        ("b", "required vhpc.so\n", False, Level.ERROR),
        ("c", "required pyxis.so\n# required vhpc.so\n", True, Level.ERROR),
    ):
        (tmp_path / name).mkdir()
        assert plugstack_of(tmp_path / name, text, installed=installed).level is level


@pytest.mark.promise("hooks.paths")
def test_plugin_that_looks_into_other_folders_is_an_error(tmp_path: Path) -> None:
    moved = Paths(run="/run/site/vhpc", libexec="/opt/vhpc/libexec")
    right = "required vhpc.so run_dir=/run/site/vhpc/ libexec=/opt/vhpc/libexec # moved\n"
    for name, text, paths, level in (
        ("a", right, moved, Level.OK),
        ("b", right, Paths(), Level.ERROR),
        ("c", "required vhpc.so libexec=/opt/vhpc/libexec # run_dir=/run/site/vhpc\n", moved, Level.ERROR),
        ("d", "required vhpc.so\n", moved, Level.ERROR),
        ("e", "required vhpc.so\n", Paths(state="/data/vhpc"), Level.OK),
    ):
        (tmp_path / name).mkdir()
        found = plugstack_of(tmp_path / name, text, paths=paths)
        assert found.level is level, name
        assert level is Level.OK or f"run_dir={paths.run}" in found.hint


@pytest.mark.promise("install.slurmctld")
def test_a_host_of_slurmctld_only_needs_no_plugin(tmp_path: Path) -> None:
    for name, text, installed, level in (
        ("a", "# nothing\n", False, Level.OK),
        # of a configless controller, whose own srun would not start
        ("b", "required vhpc.so\n", False, Level.ERROR),
        ("c", "required vhpc.so\n", True, Level.OK),
    ):
        (tmp_path / name).mkdir()
        assert plugstack_of(tmp_path / name, text, installed=installed, submits=False).level is level
