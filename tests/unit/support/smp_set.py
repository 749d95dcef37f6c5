# SPDX-License-Identifier: Apache-2.0
"""Writes a block of a port's P_Key table with a subnet management packet, as any user of umad could.

Run as ``python smp_set.py ROUTE BLOCK ENTRY...`` in a simulated fabric's environment: ROUTE is a directed
route such as ``0,1,3``, ENTRY a 16-bit entry in hexadecimal; entries that are not named become empty.
"""

from __future__ import annotations

import struct
import sys

from vhpc_slurm.fabric.smp import KEYS_A_BLOCK, PKEY_TABLE, SmpPort


def main(route: str, block: str, *entries: str) -> int:
    path = tuple(int(word) for word in route.split(",")[1:])
    values = [int(word, 16) for word in entries]
    row = struct.pack(f">{KEYS_A_BLOCK}H", *values, *[0] * (KEYS_A_BLOCK - len(values)))
    return 0 if SmpPort("", 0).send("smp_set_via", path, PKEY_TABLE, int(block), row) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
