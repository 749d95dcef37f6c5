# SPDX-License-Identifier: Apache-2.0
"""plugstack.conf: whether Slurm loads vhpc.so, and with the folders that vhpc.toml has."""

from __future__ import annotations

import glob
import re
from dataclasses import dataclass
from pathlib import Path

from vhpc_slurm.cli.host.checks import CheckResult, error, ok, warn
from vhpc_slurm.config import Config, Paths
from vhpc_slurm.slurm.settings import SlurmSettings

_LINE = re.compile(r"^\s*(required|optional|include)\s+(\S+)([^#\n]*)")


@dataclass(frozen=True)
class PluginLine:
    """The line of plugstack.conf that loads vhpc.so.

    Attributes:
        mode: ``required`` or ``optional``.
        plugin: vhpc.so, or its path.
        arguments: what the plugin is told, by name.
    """

    mode: str
    plugin: str
    arguments: dict[str, str]


def needed(config: Config) -> dict[str, str]:
    """Arguments without which the plugin would look into other folders than the hooks."""
    default, paths = Paths(), config.paths
    wanted = {"run_dir": (paths.run, default.run), "libexec": (paths.libexec, default.libexec)}
    return {name: path for name, (path, initial) in wanted.items() if Path(path) != Path(initial)}


def wrong_arguments(config: Config, line: PluginLine) -> list[str]:
    """Arguments that the line lacks, or has otherwise than vhpc.toml, as they have to be."""
    paths = {"run_dir": config.paths.run, "libexec": config.paths.libexec}
    used = {"run_dir": Paths().run, "libexec": Paths().libexec} | line.arguments
    return [f"{name}={path}" for name, path in paths.items() if Path(used[name]) != Path(path)]


def check(
    settings: SlurmSettings, config: Config, named: str = "", *, submits: bool = True, is_node: bool = False
) -> CheckResult:
    """Whether Slurm loads the SPANK plugin of vhpc on this host.

    ``named`` is this host's slurm.conf, where it is another than that of slurmctld.  ``submits`` is false on
    a host of slurmctld only, which does not load plugins of SPANK: there users need not submit jobs.
    ``is_node``: tasks of jobs run on this host.
    """
    name = "slurm.plugstack"
    conf = Path(settings.first("SLURM_CONF") or "/etc/slurm/slurm.conf")
    path = Path(settings.first("PlugStackConfig") or conf.with_name("plugstack.conf"))
    if named and path == conf.with_name("plugstack.conf"):  # the default: next to slurm.conf
        path = Path(named).with_name("plugstack.conf")
    found = find_line(path)
    if found is None and not submits:
        return ok(name, f"{path} does not load vhpc.so: jobs with guests are submitted on other hosts")
    if found is None:
        return error(
            name,
            f"{path} does not load vhpc.so: Slurm has no option --vhpc-image",
            f"add to {path}: required vhpc.so",
        )
    plugin = found.plugin
    folders = settings.first("PluginDir").split(":")
    places = [plugin] if plugin.startswith("/") else [f"{folder}/{plugin}" for folder in folders]
    if not any(Path(place).is_file() for place in places):
        return error(
            name,
            f"{path} loads {plugin}, which does not exist at {' or '.join(places)}: "
            "sbatch, salloc and srun fail on this host",
            "install vhpc-spank-plugin, or vhpc.so for this release of Slurm",
        )
    if found.mode != "required":
        return warn(
            name,
            f"{plugin} is optional in {path}: if it fails to load, tasks run outside of their guests",
            f"required {plugin}",
        )
    if is_node and (wrong := wrong_arguments(config, found)):
        return error(
            name,
            f"{path} loads {plugin} without {' '.join(wrong)}, the folders of vhpc.toml: tasks of jobs with "
            "guests are refused",
            f"{found.mode} {plugin} {' '.join(wrong)}",
        )
    return ok(name, f"{path} loads {plugin}")


def find_line(path: Path, depth: int = 0) -> PluginLine | None:
    """The line for vhpc.so; includes are followed, patterns too."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        match = _LINE.match(line)
        if match is None:
            continue
        if match[1] != "include":
            if Path(match[2]).name == "vhpc.so":
                words = (word.partition("=") for word in match[3].split())
                return PluginLine(match[1], match[2], {key: value for key, _, value in words})
            continue
        pattern = match[2] if match[2].startswith("/") else str(path.parent / match[2])
        for included in sorted(glob.glob(pattern)):  # noqa: PTH207 - as Slurm expands it
            found = find_line(Path(included), depth + 1) if depth < 8 else None
            if found is not None:
                return found
    return None
