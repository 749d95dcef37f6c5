# SPDX-License-Identifier: Apache-2.0
"""Folders of vhpc.toml that programs besides the Python package use as well."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from vhpc_slurm.cli.host.checks import CheckResult, error, ok, warn
from vhpc_slurm.config import Config, Paths
from vhpc_slurm.node.host.process import last_lines, run_briefly

LOGROTATE = Path("/etc/logrotate.d")
TIMEOUT_S = 10.0


def check(config: Config, logrotate: Path = LOGROTATE) -> Iterator[CheckResult]:
    """Results for this compute node."""
    yield hook_paths(config)
    yield from rotation(config, logrotate)


def hook_paths(config: Config) -> CheckResult:
    """Whether the shell hooks look into the folders of vhpc.toml, without a start of Python for each job."""
    name, program = "hooks.paths", f"{config.paths.libexec}/hook-paths"
    install = "install vhpc on this node: without it each Epilog and health check starts Python"
    named = [f"VHPC_CONFIG={os.environ['VHPC_CONFIG']}"] if "VHPC_CONFIG" in os.environ else []
    try:
        ended = run_briefly(("/usr/bin/env", *named, program), b"", TIMEOUT_S)
    except OSError as err:
        return warn(name, f"cannot start {program}: {err.strerror}", install)
    if ended is None:
        return warn(name, f"{program} did not end within {TIMEOUT_S:g} s", install)
    if ended.returncode == 1:
        return warn(
            name,
            "Epilog and health check cannot read the folders of vhpc.toml without Python, which they start "
            "for each job",
            'write the table as the line [paths], and below it lines like state = "/var/lib/vhpc"',
        )
    if ended.returncode != 0:
        return warn(name, f"{program} ended with {ended.returncode}: {last_lines(ended.stderr)}", install)
    wanted = f"{config.paths.state}\n{config.paths.run}\n"
    if ended.stdout.decode(errors="replace") != wanted:
        return error(
            name,
            f"Epilog and health check look into other folders ({last_lines(ended.stdout)}) than "
            f"{config.paths.state} and {config.paths.run}: nothing is repaired after a crash",
            "install the same version of all packages of vhpc",
        )
    return ok(name, f"Epilog and health check look into {config.paths.state} and {config.paths.run}")


def rotation(config: Config, folder: Path) -> Iterator[CheckResult]:
    """Whether logrotate knows a log folder that is not the usual one."""
    log = config.paths.log
    if Path(log) == Path(Paths().log) or not folder.is_dir():
        return
    for file in sorted(folder.iterdir()):
        if file.is_file() and f"{log}/" in file.read_text(encoding="utf-8", errors="replace"):
            yield ok("node.log", f"{file} rotates the logs in {log}")
            return
    yield warn(
        "node.log",
        f"no file in {folder} names {log}: hooks.log grows without a limit",
        f"copy {folder}/vhpc-node to {folder}/vhpc-site, with {log}/hooks.log as the file",
    )
