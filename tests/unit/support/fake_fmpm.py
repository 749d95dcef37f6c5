# SPDX-License-Identifier: Apache-2.0
"""A fake of the Fabric Manager's fmpm.

It has the table of an HGX H100 with eight GPUs as NVIDIA's Fabric Manager User
Guide lists it (one partition of eight, two of four, four of two, eight of
one), prints the JSON that fmpm -l prints where the Fabric Manager has not the
GPUs (no PCI addresses), and refuses as the guide says: a partition is not
activated while one that shares a GPU with it is.  ``manager`` is nv-fabricmanager, of
which only --version is there, as public logs show it (535.161.08).
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

TABLE = [
    [1, 2, 3, 4, 5, 6, 7, 8],
    [1, 2, 3, 4],
    [5, 6, 7, 8],
    [1, 3],
    [2, 4],
    [5, 7],
    [6, 8],
    *([number] for number in range(1, 9)),
]
SCRIPT = """#!{python} -IS
import json, os, sys
state = json.load(open({state!r}))
flag, number = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else -1
if state.get("down"):
    sys.exit("Error: cannot connect to the Fabric Manager")
if flag == "-l":
    gpu = lambda n: {{"physicalId": n, "pciBusId": "00000000:00:00.0", "uuid": "", "maxNumNvLinks": 18,
                     "numNvLinksAvailable": 18, "nvlinkLineRateMBps": 26562}}
    print(json.dumps({{"maxNumPartitions": 15, "numPartitions": len(state["table"]), "partitionInfo": [
        {{"partitionId": i, "isActive": int(i in state["active"]), "numGpus": len(g),
          "gpuInfo": [gpu(n) for n in g]}} for i, g in enumerate(state["table"])]}}, indent=3))
    sys.exit(0)
table, active = state["table"], set(state["active"])
if flag == "-a":
    if any(set(table[number]) & set(table[other]) for other in active):
        sys.exit("Error: failed to activate: partition's GPUs are in use")
    active |= {{number}} - set(state.get("deaf", []))
elif flag == "-d":
    if number not in active:
        sys.exit("Error: failed to deactivate: partition is not active")
    active -= {{number}} - set(state.get("stuck", []))
json.dump(state | {{"active": sorted(active)}}, open({state!r}, "w"))
"""


VERSION = """#!{python} -IS
import json, sys
assert sys.argv[1:] == ["--version"]
print("\\n\\n\\tFabric Manager version is : " + json.load(open({state!r}))["version"] + "\\n")
"""


@dataclass
class Fmpm:
    script: Path
    state: Path
    manager: Path

    def set(self, **changes: object) -> None:
        self.state.write_text(json.dumps(json.loads(self.state.read_text()) | changes))

    @property
    def active(self) -> list[int]:
        return list(json.loads(self.state.read_text())["active"])


@pytest.fixture(name="fmpm")
def fake_fmpm(tmp_path: Path) -> Fmpm:
    found = Fmpm(tmp_path / "fmpm", tmp_path / "fmpm.json", tmp_path / "nv-fabricmanager")
    found.state.write_text(json.dumps({"table": TABLE, "active": [], "version": "580.95.05"}))
    for path, text in ((found.script, SCRIPT), (found.manager, VERSION)):
        path.write_text(text.format(python=os.path.realpath(sys.executable), state=str(found.state)))
        path.chmod(0o755)
    return found
