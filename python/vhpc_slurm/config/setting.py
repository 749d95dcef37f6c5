# SPDX-License-Identifier: Apache-2.0
"""Documentation and limits of a key of vhpc.toml, given where the key is declared."""

from __future__ import annotations

from typing import Any

import msgspec


def documented(text: str, **limits: Any) -> msgspec.Meta:
    """A key's meaning, for the manual, and the limits of its value (``ge``, ``le``, ``min_length`` ...)."""
    return msgspec.Meta(description=text, **limits)
