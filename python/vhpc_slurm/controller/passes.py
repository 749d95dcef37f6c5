# SPDX-License-Identifier: Apache-2.0
"""Work that vhpcd repeats at an interval."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from vhpc_slurm.errors import VhpcError

log = logging.getLogger("vhpcd")


@contextmanager
def guarded(outcome: str) -> Iterator[None]:
    """Log an error of a pass with its outcome; the next pass tries again."""
    try:
        yield
    except VhpcError as err:
        log.warning("%s: %s", outcome, err.line())
    except Exception:
        log.exception("%s", outcome)
