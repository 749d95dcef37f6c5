# SPDX-License-Identifier: Apache-2.0
"""Fixtures for tests of completion: a site with images and jobs, and the command vhpc."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from site_catalog import publish

ROOT = Path(__file__).resolve().parents[3]


def completion_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A site with three images and a user with two running jobs; commands are in ``tmp_path``."""
    for name in ("debian-minimal", "debian-hpc"):
        publish(tmp_path / "site", name, b"root")
    publish(tmp_path / "own/root/images", "mine", b"root")
    scripts = {
        "squeue": "[ \"$*\" = '--noheader --user root --states=RUNNING --format=%A' ] && printf '71\\n8\\n'",
        "vhpc": f'exec {ROOT}/.venv/bin/python -m vhpc_slurm.cli.main "$@"',
    }
    for program, text in scripts.items():
        (tmp_path / program).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / program).chmod(0o755)
    (tmp_path / "vhpc.toml").write_text(
        f'[controller]\nslurm_bin = "{tmp_path}"\n[images]\ncatalog = "{tmp_path}/site"\n'
        f'user_catalog = "{tmp_path}/own/{{user}}/images"\n'
    )
    monkeypatch.setenv("VHPC_CONFIG", str(tmp_path / "vhpc.toml"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "python"))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path
