# SPDX-License-Identifier: Apache-2.0
"""msgspec examines the records of vhpcd before vhpcd starts threads: two that do it at once crash it."""

from __future__ import annotations

import subprocess
import sys

PROBE = """
import sys
import vhpc_slurm.controller.server
from msgspec import Struct
from msgspec.json import Decoder
from vhpc_slurm import record

def examined():
    calls = []
    sys.setprofile(lambda frame, event, _: event == "call" and calls.append(frame.f_code.co_name))
    try:
        for kind in record._below(Struct):
            Decoder(kind)
    finally:
        sys.setprofile(None)
    return calls.count("get_class_annotations")

record.prepare()
print(len(list(record._below(Struct))) > 100, examined())
class Later(record.Record, frozen=True):
    field: int
print(examined())
"""


def test_no_record_is_examined_after_the_start() -> None:
    """A class that is made later is, so the probe would see it."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "True 0\n1\n"
