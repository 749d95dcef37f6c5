# SPDX-License-Identifier: Apache-2.0
"""Starts a hook with modules of one version only, also while packages are being replaced.

    python -I -m vhpc_slurm.hooks.start MODULE [ARGUMENT…]

dpkg replaces the files of the Python package one by one, in about a second.  A hook that
starts then could import half of either version, and one that imports a module late could
get it from a newer version than its other modules.  So the package's preinst makes a mark
and its postinst removes it; a hook that starts meanwhile waits, and a hook imports all that
it may need before it changes anything.  If the package was replaced during these imports, it
starts again.  Prolog first asks vhpcd for its lease, with few modules, and then imports the rest.

This module imports the standard library only: it must work between any two versions.
"""
# Decision: A hook waits while its package is replaced

from __future__ import annotations

import gc
import importlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TypeVar

T = TypeVar("T")

MARK = Path("/run/vhpc-upgrading")
"""Exists while the files of the package are being replaced; debian/vhpc-common.preinst makes it."""
STALE_S = 600.0
"""A mark of this age is left from a package manager that was killed."""
WAIT_S = 120.0
"""How long a hook waits at most; then it runs with the files that it finds."""
POLL_S = 0.1
_SCONTROL = "vhpc_slurm.slurm.scontrol"
LATE = {
    "vhpc_slurm.hooks.prolog": (),
    "vhpc_slurm.hooks.epilog": (_SCONTROL,),
    "vhpc_slurm.hooks.healthcheck": (_SCONTROL, "vhpc_slurm.hooks.textfile"),
    "vhpc_slurm.hooks.slurmctld": (_SCONTROL,),
    "vhpc_slurm.hooks.hookd": (_SCONTROL,),
    "vhpc_slurm.hooks.follower": (_SCONTROL, "vhpc_slurm.slurm.comments"),
    "vhpc_slurm.hooks.preloaded": ("vhpc_slurm.hooks.bringup", _SCONTROL, "vhpc_slurm.slurm.comments"),
    "vhpc_slurm.hooks.keeper": (_SCONTROL, "vhpc_slurm.slurm.comments"),
}
"""Modules that a hook imports only when it needs them."""
REST = {"vhpc_slurm.hooks.prolog": ("vhpc_slurm.hooks.bringup", _SCONTROL)}
"""Modules that a hook imports after its question to vhpcd."""
_DEADLINE = "VHPC_HOOK_START_DEADLINE"


def main(words: list[str]) -> int:
    """Run ``MODULE.entry`` with the other words; returns its exit status."""
    module, *arguments = words
    deadline = _deadline()
    while _upgrading() and time.time() < deadline:
        time.sleep(POLL_S)
    _Started.version, _Started.deadline = version(), deadline
    hook = _of_one_version(lambda: load(module))
    os.environ.pop(_DEADLINE, None)
    status: int = hook.entry(*arguments)
    return status


class _Started:
    """What ``main`` has seen before the first import; a hook that nothing has started may import anything."""

    version: tuple[int, int, int] | None = None
    deadline = 0.0


def settled() -> None:
    """This process has imported all that it will ever need, and must not be started again."""
    _Started.version = None


def _of_one_version(imports: Callable[[], T]) -> T:
    """Import; if the package was replaced meanwhile, start this program again."""

    # Imports make many objects and no garbage; collections in between are a tenth of their CPU time.
    gc.disable()

    def again() -> bool:
        seen = _Started.version
        return seen is not None and time.time() < _Started.deadline and mixed(seen)

    try:
        done = imports()
    except Exception:
        if again():
            _again(_Started.deadline)
        raise
    if again():
        _again(_Started.deadline)
    gc.freeze()
    gc.enable()
    return done


def load(module: str) -> ModuleType:
    """Import a hook and all modules that it may import later.

    Raises:
        ImportError: a module is missing or does not fit the others.
    """
    hook = importlib.import_module(module)
    for late in LATE[module]:
        importlib.import_module(late)
    return hook


def load_rest(module: str) -> None:
    """Import what a hook needs after its question to vhpcd; the hook has changed nothing yet.

    Raises:
        ImportError: a module is missing or does not fit the others.
    """
    _of_one_version(lambda: [importlib.import_module(name) for name in REST[module]])


def _upgrading() -> bool:
    """Whether the package is being replaced now."""
    try:
        return 0 <= time.time() - MARK.stat().st_mtime < STALE_S
    except OSError:
        return False


def version() -> tuple[int, int, int]:
    """Attributes that change when the package is replaced: dpkg renames a new file to each path."""
    found = (Path(__file__).parents[1] / "__init__.py").stat()
    return found.st_dev, found.st_ino, found.st_ctime_ns


def mixed(before: tuple[int, int, int]) -> bool:
    """Whether the modules that were imported may be of two versions."""
    try:
        return _upgrading() or version() != before
    except OSError:
        return True


def _again(deadline: float) -> None:
    """Replace this process by the same hook with new modules."""
    os.environ[_DEADLINE] = str(deadline)
    os.execv(sys.executable, sys.orig_argv)  # noqa: S606 - this program again, no shell


def _deadline() -> float:
    """Until when to wait, in seconds since the epoch; the same after the hook has started again."""
    latest = time.time() + WAIT_S
    try:
        return min(latest, float(os.environ[_DEADLINE]))
    except (KeyError, ValueError):
        return latest


if __name__ == "__main__":
    # hooks import this module by its name, and must find what main() has noted
    sys.exit(importlib.import_module("vhpc_slurm.hooks.start").main(sys.argv[1:]))
