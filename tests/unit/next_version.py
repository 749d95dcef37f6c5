# SPDX-License-Identifier: Apache-2.0
"""The next version of vhpc, as far as its database differs."""

from __future__ import annotations

import pytest

from vhpc_slurm.controller.store import mariaschema, schema

NEXT_SCHEMA = schema.SCHEMA_VERSION + 1
SQLITE_STEP = """
CREATE TABLE colour (name TEXT PRIMARY KEY) STRICT;
ALTER TABLE lease ADD COLUMN hue TEXT NOT NULL DEFAULT 'red';
"""
MARIADB_STEP = (
    "CREATE TABLE IF NOT EXISTS colour (name VARCHAR(9) PRIMARY KEY)",
    "ALTER TABLE lease ADD COLUMN IF NOT EXISTS hue VARCHAR(9) NOT NULL DEFAULT 'red'",
)


def become_next(monkeypatch: pytest.MonkeyPatch, sqlite_step: str = SQLITE_STEP) -> None:
    """Add a step to both schemas."""
    monkeypatch.setattr(schema, "STEPS", (*schema.STEPS, sqlite_step))
    monkeypatch.setattr(mariaschema, "STEPS", (*mariaschema.STEPS, MARIADB_STEP))
    for module in (schema, mariaschema):
        monkeypatch.setattr(module, "SCHEMA_VERSION", NEXT_SCHEMA)
