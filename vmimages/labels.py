# SPDX-License-Identifier: Apache-2.0
"""Labels of an image that its builder gives it: KEY=VALUE."""

from __future__ import annotations

import re
from collections.abc import Iterable

from vmimages.errors import BuildError

# As a manifest can have them (vhpc_slurm.catalog.manifest), which a build host may not have.
KEY = re.compile(r"[a-z0-9][a-z0-9._/-]*", re.ASCII)
KEY_MAX, VALUE_MAX, MOST = 128, 1024, 64
OF_VHPC = "vhpc/"
"""How the keys begin that say what vhpc has done."""


def parse(texts: Iterable[str]) -> dict[str, str]:
    """Labels as users write them; of equal keys the last counts.

    Raises:
        BuildError: one is not a label.
    """
    found = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not KEY.fullmatch(key) or key.startswith(OF_VHPC):
            why = f"KEY=VALUE is expected; a key has a-z, 0-9 and ._/-, and does not begin with {OF_VHPC}"
            raise BuildError(f"--label={text[:80]!r} is not a label", why)
        if len(key) > KEY_MAX or len(value) > VALUE_MAX or not value.isprintable():
            why = f"a key has at most {KEY_MAX} characters, a value {VALUE_MAX} and no control characters"
            raise BuildError(f"--label={text[:80]!r} is not a label", why)
        found[key] = value
    return found


def joined(given: dict[str, str], of_vhpc: dict[str, str]) -> dict[str, str]:
    """All labels of an image; BuildError if they are too many."""
    found = given | of_vhpc
    if len(found) > MOST:
        raise BuildError(f"{len(given)} labels are too many", f"at most {MOST - len(of_vhpc)} are possible")
    return found
