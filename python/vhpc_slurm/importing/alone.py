# SPDX-License-Identifier: Apache-2.0
"""Imports and pulls into one catalogue wait for each other, so that a source is fetched once."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from vhpc_slurm import files
from vhpc_slurm.catalog.changes import changing
from vhpc_slurm.errors import UserError

LOCK = ".sources.lock"


@contextlib.contextmanager
def alone(catalog: Path, timeout_s: float, progress: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of imports by source.

    Raises:
        UserError: another process has held it for ``timeout_s`` seconds, or the catalogue cannot be changed.
    """
    with changing(catalog):
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        lock = os.open(catalog / LOCK, flags, 0o600)
    try:
        if not files.try_lock(lock):
            progress("waiting for another import into your catalogue")
            if not files.lock(lock, timeout_s):
                why = f"another import has not ended for {timeout_s:.0f} s"
                raise UserError(f"the image catalogue {catalog} is in use", why, "try again later")
        yield
    finally:
        os.close(lock)
