# SPDX-License-Identifier: Apache-2.0
"""The packages of the release before this checkout."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from debs import ROOT, run

CACHE = ROOT / "build/previous"


def revision() -> str:
    """The commit of $VHPC_PREVIOUS, of the newest tag before HEAD, or of the file previous-release."""
    named = os.environ.get("VHPC_PREVIOUS", "")
    tags = run("git", "tag", "--merged", "HEAD^", "--sort=-version:refname", "v*").split()
    lines = (Path(__file__).parent / "previous-release").read_text().splitlines()
    (kept,) = (line for line in lines if not line.startswith("#"))
    name = named or (tags[0] if tags else kept)
    return run("git", "rev-parse", "--verify", f"{name}^{{commit}}").strip()


def packages() -> Path:
    """A folder with them; built once, in a clone of the repository."""
    commit = revision()
    found = CACHE / commit[:12]
    if not (found / "lintian.txt").exists():
        source = CACHE / "source"
        shutil.rmtree(source, ignore_errors=True)
        CACHE.mkdir(parents=True, exist_ok=True)
        run("git", "clone", "--quiet", "--shared", "--no-checkout", ROOT, source)
        run("git", "-C", source, "checkout", "--quiet", "--detach", commit)
        built = CACHE / f"{commit[:12]}.partial"
        shutil.rmtree(built, ignore_errors=True)
        run("env", "-C", source, "packaging/build", "--output", built)
        for symbols in built.glob("*-dbgsym_*.deb"):
            symbols.unlink()
        built.rename(found)
        shutil.rmtree(source)
    return found
