# SPDX-License-Identifier: Apache-2.0
"""Writes a block of a port's P_Key table with a subnet management packet, as whoever opens umad could.

Run as ``python smp_set.py ROUTE BLOCK ENTRY...`` in a simulated fabric's environment: ROUTE is a directed
route such as ``0,1,3``, ENTRY a 16-bit entry in hexadecimal; entries that are not named become empty.
"""

from __future__ import annotations

import ctypes
import struct
import sys

from vhpc_slurm.fabric.smp import _CLASSES, KEYS_A_BLOCK, PKEY_TABLE, _PortId


def main(route: str, block: str, *entries: str) -> int:
    library = ctypes.CDLL("libibmad.so.5")
    library.mad_rpc_open_port.restype = ctypes.c_void_p
    library.smp_set_via.restype = ctypes.c_void_p
    library.smp_set_via.argtypes = [
        ctypes.c_void_p,
        ctypes.POINTER(_PortId),
        ctypes.c_uint,
        ctypes.c_uint,
        ctypes.c_uint,
        ctypes.c_void_p,
    ]
    port = library.mad_rpc_open_port(None, 0, (ctypes.c_int * len(_CLASSES))(*_CLASSES), len(_CLASSES))
    hops = [int(word) for word in route.split(",")][1:]
    target = _PortId()
    target.drpath.cnt = len(hops)
    for hop, number in enumerate(hops, 1):
        target.drpath.p[hop] = number
    values = [int(word, 16) for word in entries]
    row = struct.pack(f">{KEYS_A_BLOCK}H", *values, *[0] * (KEYS_A_BLOCK - len(values)))
    data = ctypes.create_string_buffer(row, 64)
    done = library.smp_set_via(data, ctypes.byref(target), PKEY_TABLE, int(block), 0, port)
    return 0 if done else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
