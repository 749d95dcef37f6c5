# SPDX-License-Identifier: Apache-2.0
"""The exceptions of decoders."""

from __future__ import annotations

from msgspec import MsgspecError

UNDECODABLE = (ValueError, RecursionError, MsgspecError)
"""Exceptions of JSON and TOML decoders for invalid syntax, invalid UTF-8, or too deep nesting.

msgspec's are ValueErrors since its version 0.20; Debian 13 has 0.19.
"""
