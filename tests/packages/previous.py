# SPDX-License-Identifier: Apache-2.0
"""The packages that an upgrade begins with, and those that it ends with.

It begins with the newest release of packaging/releases, or with $VHPC_PREVIOUS, a revision. Before the first
release it begins with this checkout.

It ends with the packages of this checkout. If both have the same schema, the upgrade would migrate no
database: then it ends with those of ``next_checkout``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from debs import ROOT, run

from next_checkout import SCHEMA, make_next
from releases import releases

CACHE = ROOT / "build/upgrade"


@dataclass(frozen=True)
class Packages:
    """A folder with packages, and the schema of their vhpcd."""

    folder: Path
    schema: int


def revision() -> str:
    """The commit that the upgrade begins with; empty if that is this checkout."""
    found = releases()
    if name := os.environ.get("VHPC_PREVIOUS", found[-1].commit if found else ""):
        return run("git", "rev-parse", "--verify", f"{name}^{{commit}}").strip()
    return ""


def older(checkout: Path) -> Packages:
    """The packages that the upgrade begins with; ``checkout`` has those of this checkout."""
    commit = revision()
    if not commit:
        return Packages(checkout, _schema(ROOT))
    source = _clone("older", commit)
    return Packages(_build(source, CACHE / commit[:12]), _schema(source))


def newer(checkout: Path, than: Packages) -> Packages:
    """The packages that the upgrade ends with."""
    schema = _schema(ROOT)
    if schema > than.schema:
        return Packages(checkout, schema)
    source = _clone("next", "HEAD")
    _copy_changes(source)
    make_next(source)
    shutil.rmtree(CACHE / "packages-next", ignore_errors=True)
    return Packages(_build(source, CACHE / "packages-next"), _schema(source))


def _schema(source: Path) -> int:
    script = "import runpy, sys; print(runpy.run_path(sys.argv[1])['SCHEMA_VERSION'])"
    return int(run(sys.executable, "-c", script, source / SCHEMA, PYTHONPATH=str(source / "python")))


def _clone(name: str, commit: str) -> Path:
    """A clone of the repository, with a commit of it."""
    source = CACHE / f"source-{name}"
    shutil.rmtree(source, ignore_errors=True)
    CACHE.mkdir(parents=True, exist_ok=True)
    run("git", "clone", "--quiet", "--shared", "--no-checkout", ROOT, source)
    run("git", "-C", source, "checkout", "--quiet", "--detach", commit)
    return source


def _copy_changes(source: Path) -> None:
    """Bring what is not committed into a clone, as packaging/build takes it."""
    changes = subprocess.run(["git", "diff", "--binary", "HEAD"], cwd=ROOT, check=True, capture_output=True)
    if changes.stdout:
        subprocess.run(["git", "apply", "--index"], cwd=source, check=True, input=changes.stdout)


def _build(source: Path, folder: Path) -> Path:
    """Build the packages of a clone, once for a folder."""
    if not (folder / "lintian.txt").exists():
        built = folder.with_name(f"{folder.name}.partial")
        shutil.rmtree(built, ignore_errors=True)
        run("env", "-C", source, "packaging/build", "--output", built)
        for symbols in built.glob("*-dbgsym_*.deb"):
            symbols.unlink()
        built.rename(folder)
    return folder
