# SPDX-License-Identifier: Apache-2.0
"""Commands for tests of the packages."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pace import limit

ROOT = Path(__file__).parents[2]
LIMIT_S = 1500
NAMES = {
    "vhpc-client",
    "vhpc-common",
    "vhpc-controller",
    "vhpc-image-tools",
    "vhpc-node",
    "vhpc-spank-plugin",
}
USED = (
    "vhpc 0.",
    "prolog: no guests",
    "vhpc_slurm.hooks.prolog: imported",
    "vhpc_slurm.hooks.epilog: imported",
    "usage: vmimages/build",
    "logrotate: valid",
)
"""Lines of programs that a trial of packages has run."""
STAYS = {f"/etc/{name}{copy}" for name in ("passwd", "shadow", "group", "gshadow") for copy in ("", "-")}
"""Accounts of removed packages stay, as Debian's rules recommend."""


@dataclass(frozen=True)
class Suite:
    """A release of Debian that packages are built for."""

    name: str
    # what its packages have in their versions
    mark: str
    # its Slurm, and a version that is above all of that release
    slurm: str
    beyond: str


TRIXIE = Suite("trixie", "+deb13", "24.11", "24.12~")
BOOKWORM = Suite("bookworm", "+deb12", "22.05", "22.06~")
SUITES = (TRIXIE, BOOKWORM)


def run(*words: str | Path, **environment: str) -> str:
    """Stdout of a command that must succeed, in the checkout."""
    done = subprocess.run(
        words,
        cwd=ROOT,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


def until(true: Callable[[], bool], what: str, limit_s: float = 300.0) -> None:
    """Wait for a condition."""
    end = time.monotonic() + limit(limit_s)
    while not true():
        assert time.monotonic() < end, f"no {what} after {limit_s:g} s"
        time.sleep(0.5)


def newer(package: Path, folder: Path) -> None:
    """Write the same package with a higher version, as its next release."""
    tree = folder / "tree"
    run("dpkg-deb", "-R", package, tree)
    control = tree / "DEBIAN/control"
    control.write_text(re.sub(r"\+deb\d+", r"\g<0>+newer", control.read_text()))
    run("dpkg-deb", "-Zgzip", "-z1", "-b", tree, folder / package.name)
    shutil.rmtree(tree)
