# SPDX-License-Identifier: Apache-2.0
"""Fields of vhpcd's messages and of what its database keeps as JSON.

As a program it prints those of this checkout, for tests/data/release/fields.json.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from vhpc_slurm.controller.api import protocol as wire
from vhpc_slurm.controller.store.schema import SCHEMA_VERSION
from vhpc_slurm.controller.wire_types import LeaseWire, TimelineWire


def fields(*kinds: object) -> dict[str, list[str]]:
    """Names of the fields of all structures in these types."""
    _, parts = msgspec.json.schema_components(kinds)
    return {name: sorted(part["properties"]) for name, part in parts.items() if "properties" in part}


def of_checkout() -> dict[str, Any]:
    """The versions of protocol and schema, and the fields that belong to them."""
    return {
        "protocol": wire.VERSION,
        "schema": SCHEMA_VERSION,
        "messages": fields(wire.Request, wire.Answer),
        "stored": fields(LeaseWire, TimelineWire),
    }


if __name__ == "__main__":
    print(json.dumps(of_checkout(), indent=1, sort_keys=True))
