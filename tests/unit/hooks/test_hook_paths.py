# SPDX-License-Identifier: Apache-2.0
"""Hooks in shell use the folders of vhpc.toml: what hook-paths reads is what Python's TOML parser reads."""

from __future__ import annotations

import os
import subprocess
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest
from doctor_rig import executable

from vhpc_slurm.cli.host.checks import Level, folders
from vhpc_slurm.config import Config, Paths

CHECKOUT = Path(__file__).parents[3]
DEFAULT = ("/var/lib/vhpc", "/run/vhpc")
# Forms that sites write: these must not need Python.
USUAL = (
    "",
    '[controller]\nhost = "ctl"\n',
    '[paths]\nstate = "/data/vhpc"\nrun = "/dev/shm/vhpc"\n',
    "[paths]\nlog = '/data/log'\nrun='/dev/shm/vhpc'# moved\n[guests]\nuid_base = 1\n",
    '# [paths]\n# state = "/old"\n  [paths]  # moved\n\tstate\t=  "/data/my vhpc"   # "disk"\n#run = "/x"\n',
    '[host]\nhugepages = [\n  "1G:0=64",\n]\n[[policy]]\nname = "a"\n[paths]\nrun = "/r" ',
    '[policy]\nstate = "/no"\nruns = 3\n[paths]\nlibexec = "/opt/libexec"\n',
    '[paths]\nstate = "/data/é"\n[other]\nrun = "/no"\n',
)
# The same in forms that only a parser of TOML reads.
UNUSUAL = (
    'paths.state = "/data/vhpc"\n',
    'paths = { state = "/data/vhpc", run = "/r" }\n',
    '"paths".state = "/data/vhpc"\n',
    '[ paths ]\nstate = "/data/vhpc"\n',
    '["paths"]\nstate = "/data/vhpc"\n',
    "['paths']\nrun = '/r'\n",
    '["p\\u0061ths"]\nstate = "/data/vhpc"\n',
    '"p\\u0061ths".state = "/data/vhpc"\n',
    '[paths]\n"state" = "/data/vhpc"\n',
    '[paths]\n"st\\u0061te" = "/data/vhpc"\n',
    '[paths]\nstate = "/data\\u002fvhpc"\n',
    '[paths]\nstate = """/data/vhpc"""\n',
    "[paths]\nrun = '''\n/r'''\n",
    '[paths]\r\nstate = "/data/vhpc"\r\n',
    'x = """\n[paths]\nstate = "/no"\n"""\n[paths]\nrun = "/r"\n',
)


def asked(config: Path | None) -> tuple[int, tuple[str, ...]]:
    """Exit status and lines of hook-paths."""
    env = {"PATH": os.environ["PATH"]} | ({"VHPC_CONFIG": str(config)} if config else {})
    program = CHECKOUT / "prolog/hook-paths"
    ended = subprocess.run([program], env=env, capture_output=True, text=True, timeout=30, check=False)
    assert ended.stderr == ""
    return ended.returncode, tuple(ended.stdout.splitlines())


def parsed(text: str) -> tuple[str, str]:
    paths = tomllib.loads(text).get("paths", {})
    return paths.get("state", DEFAULT[0]), paths.get("run", DEFAULT[1])


@pytest.mark.promise("hooks.paths")
@pytest.mark.parametrize("text", USUAL)
def test_usual_forms_of_paths_need_no_python(text: str, tmp_path: Path) -> None:
    (tmp_path / "vhpc.toml").write_text(text)
    assert asked(tmp_path / "vhpc.toml") == (0, parsed(text))


@pytest.mark.parametrize("text", UNUSUAL)
def test_other_forms_of_paths_are_left_to_python(text: str, tmp_path: Path) -> None:
    assert parsed(text) != DEFAULT
    (tmp_path / "vhpc.toml").write_bytes(text.encode())
    assert asked(tmp_path / "vhpc.toml") == (1, ())


def test_without_a_file_the_folders_are_the_defaults(tmp_path: Path) -> None:
    if not Path("/etc/vhpc/vhpc.toml").exists():
        assert asked(None) == (0, DEFAULT)
    assert asked(tmp_path / "absent") == (1, ()), "Python reports a named file that is absent"


# --- the hooks ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hooks:
    """Installed hooks with an interpreter that only says that it was started."""

    folder: Path

    def run(self, name: str, toml: str, **env: str) -> str:
        """The arguments of the interpreter; empty if it was not started."""
        config = self.folder / "vhpc.toml"
        config.write_text(toml)
        env |= {"PATH": os.environ["PATH"], "VHPC_CONFIG": str(config)}
        ended = subprocess.run(
            [self.folder / name], env=env, capture_output=True, text=True, timeout=30, check=False
        )
        assert (ended.returncode, ended.stderr) == (0, "")
        return ended.stdout.strip()


@pytest.fixture
def hooks(tmp_path: Path) -> Hooks:
    python = executable(tmp_path / "python", 'echo "$4"')
    for source in ("prolog/healthcheck", "prolog/hook-paths", "epilog/epilog"):
        text = (CHECKOUT / source).read_text()
        text = text.replace("/opt/vhpc/bin/python", str(python)).replace("/usr/libexec/vhpc", str(tmp_path))
        (tmp_path / Path(source).name).write_text(text)
        (tmp_path / Path(source).name).chmod(0o755)
    return Hooks(tmp_path)


@pytest.mark.promise("hooks.paths")
@pytest.mark.parametrize(
    "form", ['[paths]\nstate = "{}/s"\nrun = "{}/r"\n', 'paths = {{state="{}/s", run="{}/r"}}']
)
@pytest.mark.parametrize("kept", ["s/journal/7.0.0", "s/outbox/7.0.0", "r/uids/700000", "r/jobs/7"])
def test_health_check_looks_into_the_folders_of_vhpc_toml(
    hooks: Hooks, tmp_path: Path, form: str, kept: str
) -> None:
    (tmp_path / kept).mkdir(parents=True)
    assert hooks.run("healthcheck", form.format(tmp_path, tmp_path)) == "vhpc_slurm.hooks.healthcheck"


def test_health_check_of_a_clean_node_starts_no_python(hooks: Hooks, tmp_path: Path) -> None:
    toml = f'[paths]\nstate = "{tmp_path}/s"\nrun = "{tmp_path}/r"\n'
    (tmp_path / "s/journal").mkdir(parents=True)
    assert hooks.run("healthcheck", toml) == ""


@pytest.mark.parametrize("line", ['[host]\nmetrics_folder = "/m"', "host.metrics_folder='/m'"])
def test_health_check_writes_metrics_of_a_clean_node(hooks: Hooks, tmp_path: Path, line: str) -> None:
    toml = f'{line}\n[paths]\nstate = "{tmp_path}/s"\nrun = "{tmp_path}/r"\n'
    assert hooks.run("healthcheck", toml) == "vhpc_slurm.hooks.healthcheck"
    assert hooks.run("healthcheck", toml.replace("/m", "")) == ""


@pytest.mark.promise("hooks.paths")
def test_epilog_looks_into_the_run_folder_of_vhpc_toml(hooks: Hooks, tmp_path: Path) -> None:
    toml = f'[paths]\nrun = "{tmp_path}/r"\n'
    (tmp_path / "r/jobs/7").mkdir(parents=True)
    assert hooks.run("epilog", toml, SLURM_JOB_ID="7") == "vhpc_slurm.hooks.epilog"
    assert hooks.run("epilog", toml, SLURM_JOB_ID="8") == ""
    assert hooks.run("epilog", toml, SLURM_JOB_ID="8", SPANK_VHPC_IMAGE="x") == "vhpc_slurm.hooks.epilog"


def test_hooks_without_hook_paths_leave_it_to_python(hooks: Hooks) -> None:
    """While dpkg unpacks a newer version, a hook may be there before hook-paths."""
    (hooks.folder / "hook-paths").write_text("#!/bin/sh\nexit 127\n")
    assert hooks.run("healthcheck", "") == "vhpc_slurm.hooks.healthcheck"
    assert hooks.run("epilog", "", SLURM_JOB_ID="7") == "vhpc_slurm.hooks.epilog"


# --- vhpc doctor -------------------------------------------------------------------------------------------


@pytest.mark.promise("hooks.paths")
def test_doctor_reports_hooks_that_look_elsewhere(
    hooks: Hooks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = {"state": "/data/vhpc", "run": "/run/site", "libexec": str(tmp_path)}
    config = Config(paths=Paths(**paths))
    toml = "[paths]\n" + "".join(f'{key} = "{value}"\n' for key, value in paths.items())
    monkeypatch.setenv("VHPC_CONFIG", str(tmp_path / "vhpc.toml"))
    for text, level in (
        (toml, Level.OK),
        ("", Level.ERROR),
        (toml.replace("[paths]", "[ paths ]"), Level.WARN),
    ):
        (tmp_path / "vhpc.toml").write_text(text)
        assert folders.hook_paths(config).level is level
    (hooks.folder / "hook-paths").unlink()
    assert folders.hook_paths(config).level is Level.WARN


def test_doctor_reports_a_log_folder_that_nothing_rotates(tmp_path: Path) -> None:
    config = Config(paths=Paths(log="/data/log"))
    (tmp_path / "vhpc-node").write_text("/var/log/vhpc/hooks.log {\n}\n")
    assert list(folders.rotation(Config(), tmp_path)) == []
    assert [one.level for one in folders.rotation(config, tmp_path)] == [Level.WARN]
    (tmp_path / "site").write_text("/data/log/hooks.log {\n}\n")
    assert [one.level for one in folders.rotation(config, tmp_path)] == [Level.OK]
