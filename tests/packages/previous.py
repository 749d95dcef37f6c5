# SPDX-License-Identifier: Apache-2.0
"""The packages of the release before this checkout."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from debs import ROOT, run

from vhpc_slurm.controller.store.schema import SCHEMA_VERSION

CACHE = ROOT / "build/previous"
_EMPTY_STEP = "    _DEFAULTS,\n)\n"


def revision() -> str:
    """The commit of $VHPC_PREVIOUS, of the newest tag before HEAD, or of the file previous-release."""
    named = os.environ.get("VHPC_PREVIOUS", "")
    tags = run("git", "tag", "--merged", "HEAD^", "--sort=-version:refname", "v*").split()
    lines = (Path(__file__).parent / "previous-release").read_text().splitlines()
    (kept,) = (line for line in lines if not line.startswith("#"))
    name = named or (tags[0] if tags else kept)
    return run("git", "rev-parse", "--verify", f"{name}^{{commit}}").strip()


def _lower_schema(source: Path) -> None:
    """Give the older vhpcd a lower schema than this checkout has, so that an upgrade migrates its database.

    While there is no release with another schema, its last step is taken out.  That step is empty: it says
    that leases have more in their JSON, which this vhpcd then writes into a database of the schema before.
    """
    found = source / "python/vhpc_slurm/controller/store/schema.py"
    script = "import runpy, sys; print(runpy.run_path(sys.argv[1])['SCHEMA_VERSION'])"
    if int(run(sys.executable, "-c", script, found, PYTHONPATH=str(source / "python"))) < SCHEMA_VERSION:
        return
    text = found.read_text()
    assert text.count(_EMPTY_STEP) == 1
    found.write_text(text.replace(_EMPTY_STEP, ")\n"))


def packages() -> Path:
    """A folder with them; built once, in a clone of the repository."""
    commit = revision()
    found = CACHE / f"{commit[:12]}-below-{SCHEMA_VERSION}"
    if not (found / "lintian.txt").exists():
        source = CACHE / "source"
        shutil.rmtree(source, ignore_errors=True)
        CACHE.mkdir(parents=True, exist_ok=True)
        run("git", "clone", "--quiet", "--shared", "--no-checkout", ROOT, source)
        run("git", "-C", source, "checkout", "--quiet", "--detach", commit)
        _lower_schema(source)
        built = found.with_name(f"{found.name}.partial")
        shutil.rmtree(built, ignore_errors=True)
        run("env", "-C", source, "packaging/build", "--output", built)
        for symbols in built.glob("*-dbgsym_*.deb"):
            symbols.unlink()
        built.rename(found)
        shutil.rmtree(source)
    return found
